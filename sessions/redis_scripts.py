"""What Redis does in one step. Scripts run one at a time, so what they compare cannot change before they write.

A session is a hash: `v` its version ("x": deleted), `u` when that was written (two gateways that lost each other may both have
written a version), `d` the record (sessions.codec), `e` its epoch: the name of the last deletion. Two sorted sets list a
tenant's sessions: one by key, for pages, and one by the time at which they end, so that those that expired leave both.
"""

from __future__ import annotations

_OF_TYPE = """
-- A key of another type was written by somebody else. It makes way, as else every command on it fails for ever.
local function of_type(key, type)
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= type then redis.call('DEL', key) end
end
"""

PUT = f"""{_OF_TYPE}
-- KEYS: session, keys of the tenant, ends of the tenant, then names to set, then names to drop
-- ARGV: version, written at, record, ttl in ms, key, mode (next | newer), number of names to set, epoch
of_type(KEYS[1], 'hash')
of_type(KEYS[2], 'zset')
of_type(KEYS[3], 'zset')
local stored = redis.call('HGET', KEYS[1], 'v')
local version = tonumber(ARGV[1])
if stored and (redis.call('HGET', KEYS[1], 'e') or '') ~= ARGV[8] then return -1 end
if stored and stored ~= 'x' then
  local known = tonumber(stored)
  if known then
    local same = known == version and redis.call('HGET', KEYS[1], 'u') == ARGV[2]
    local fits = known == version - 1
    if ARGV[6] == 'newer' then fits = known < version end
    if not same and not fits then return 0 end
  end
end
redis.call('HSET', KEYS[1], 'v', ARGV[1], 'u', ARGV[2], 'd', ARGV[3], 'e', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local time = redis.call('TIME')
local now = tonumber(time[1])
local ttl = math.ceil(tonumber(ARGV[4]) / 1000)
redis.call('ZADD', KEYS[2], 0, ARGV[5])
redis.call('ZADD', KEYS[3], now + ttl, ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], ARGV[4])
local over = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. now, 'LIMIT', 0, 64)
for _, key in ipairs(over) do
  redis.call('ZREM', KEYS[2], key)
  redis.call('ZREM', KEYS[3], key)
end
local names = tonumber(ARGV[7])
for i = 4, 3 + names do redis.call('SET', KEYS[i], ARGV[5], 'PX', ARGV[4]) end
for i = 4 + names, #KEYS do
  of_type(KEYS[i], 'string')
  if redis.call('GET', KEYS[i]) == ARGV[5] then redis.call('DEL', KEYS[i]) end
end
return 1
"""
"""1: stored; 0: another version is stored by now; -1: the session was deleted, and may have begun anew."""

DELETE = f"""{_OF_TYPE}
-- KEYS: session, keys of the tenant, ends of the tenant; ARGV: ttl of the tombstone in ms, key, epoch
of_type(KEYS[1], 'hash')
of_type(KEYS[2], 'zset')
of_type(KEYS[3], 'zset')
local stored = redis.call('HGET', KEYS[1], 'v')
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'v', 'x', 'e', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[3], ARGV[2])
if stored and stored ~= 'x' then return 1 end
return 0
"""
"""1: there was one. The tombstone tells gateways that hold a copy that it is over."""

DROP_CORRUPT = """
-- KEYS: session; ARGV: written at
if redis.call('HGET', KEYS[1], 'u') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Unless it was written anew meanwhile."""

DROP_WRONG_TYPE = """
-- KEYS: key; ARGV: the type it should have
local found = redis.call('TYPE', KEYS[1])['ok']
if found ~= 'none' and found ~= ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Unless it was written anew meanwhile."""

ADD_GAPS = """
-- KEYS: histogram, index; ARGV: half-life in s, ttl in s, member, most members, then bucket, weight, bucket, weight ...
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local half = tonumber(ARGV[1])
local landmark = tonumber(redis.call('HGET', KEYS[1], 'l') or '')
if not landmark then
  landmark = now
  redis.call('HSET', KEYS[1], 'l', string.format('%.6f', landmark))
end
local age = math.max(0, now - landmark) / half
if age > 60 then
  local fields = redis.call('HGETALL', KEYS[1])
  for i = 1, #fields, 2 do
    if fields[i] ~= 'l' then
      local weight = (tonumber(fields[i + 1]) or 0) * 2 ^ -age
      if weight > 1e-6 then redis.call('HSET', KEYS[1], fields[i], string.format('%.17g', weight))
      else redis.call('HDEL', KEYS[1], fields[i]) end
    end
  end
  redis.call('HSET', KEYS[1], 'l', string.format('%.6f', now))
  age = 0
end
for i = 5, #ARGV, 2 do
  redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], string.format('%.17g', tonumber(ARGV[i + 1]) * 2 ^ age))
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%.6f', now), ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[4]))
return 1
"""
"""Adds weights of this moment to a histogram with forward decay (sessions.gaps.histogram), by the server's clock."""

READ_GAPS = """
-- KEYS: histogram; ARGV: half-life in s. Gives bucket, weight, bucket, weight ... as of now
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local fields = redis.call('HGETALL', KEYS[1])
local landmark = now
for i = 1, #fields, 2 do if fields[i] == 'l' then landmark = tonumber(fields[i + 1]) or now end end
local age = math.max(0, now - landmark) / tonumber(ARGV[1])
local found = {}
for i = 1, #fields, 2 do
  if fields[i] ~= 'l' then
    found[#found + 1] = fields[i]
    found[#found + 1] = string.format('%.17g', (tonumber(fields[i + 1]) or 0) * 2 ^ -age)
  end
end
return found
"""
