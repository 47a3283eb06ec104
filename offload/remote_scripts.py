"""What the remote tier has Redis do, each in one step: books and values change together or not at all.

For each kind of block there are, beside the values (PREFIX + digest):

    PREFIX "used"    sorted set   digest -> when it was last used, seconds since 1970; knows every block
    PREFIX "order"   sorted set   digest -> its place in the order in which blocks go, the lowest first
    PREFIX "until"   sorted set   digest -> when what was foreseen of it, a return or a pin, counts for nothing any more
    PREFIX "meta"    hash         digest -> "depth session standing"
    PREFIX "about"   hash         what it is, how many blocks are at most, and totals

Times are the server's: its users' clocks need not agree. The order is prefix_cache.worth's: rank by standing, then by time, as
in offload.standing. A double has 53 bits, so a place in it is exact to some 15 microseconds.
"""

from __future__ import annotations

_COMMON = """
local prefix = ARGV[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local used, order, until_, meta, about = prefix..'used', prefix..'order', prefix..'until', prefix..'meta', prefix..'about'
local RANK, TAIL = 17179869184, 0.00003
local function place(standing, depth, at, expected)
  local value = at
  if standing == 2 then value = 8589934592 - expected end
  return standing * RANK + value - depth * TAIL
end
local function parts(digest)
  local text = redis.call('HGET', meta, digest)
  if not text then return 0, '0', 1 end
  local depth, session, standing = string.match(text, '^(%d+) (%d+) (%d)$')
  if not depth then return 0, '0', 1 end
  return tonumber(depth), session, tonumber(standing)
end
local function forget(digest)
  redis.call('ZREM', order, digest)
  redis.call('ZREM', until_, digest)
  redis.call('HDEL', meta, digest)
  redis.call('DEL', prefix..digest)
  return redis.call('ZREM', used, digest)
end
local function idle(digest, depth, session, at)
  redis.call('HSET', meta, digest, depth..' '..session..' 1')
  redis.call('ZADD', order, place(1, depth, at, 0), digest)
  redis.call('ZREM', until_, digest)
end
local function overdue()
  for _, digest in ipairs(redis.call('ZRANGEBYSCORE', until_, '-inf', now, 'LIMIT', 0, 1000)) do
    local depth, session = parts(digest)
    idle(digest, depth, session, tonumber(redis.call('ZSCORE', used, digest) or '0'))
  end
end
local function shrink(bound)
  local over = redis.call('ZCARD', used) - bound
  local gone = 0
  if over > 0 then
    overdue()
    while gone < over do
      local first = redis.call('ZRANGE', order, 0, 0)[1] or redis.call('ZRANGE', used, 0, 0)[1]
      if not first then break end
      forget(first)
      gone = gone + 1
    end
    if gone > 0 then redis.call('HINCRBY', about, 'evicted', gone) end
  end
  return gone
end
local function keep(ttl)
  for _, name in ipairs({used, order, until_, meta, about}) do redis.call('EXPIRE', name, ttl) end
end
local function totals()
  return redis.call('HMGET', about, 'stored', 'evicted', 'healed')
end
"""

STORE = (
    _COMMON
    + """
-- ARGV: prefix, value, digest, depth, session, bound, seconds after which it is gone when nobody asks for it
local digest, depth, session, ttl = ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[7])
if not redis.call('ZSCORE', used, digest) then
  shrink(math.max(0, tonumber(ARGV[6]) - 1))
  redis.call('HINCRBY', about, 'stored', 1)
end
redis.call('SET', prefix..digest, ARGV[2], 'EX', ttl)
redis.call('ZADD', used, now, digest)
idle(digest, depth, session, now)
keep(ttl)
return totals()
"""
)
"""Keeps a block, and gives up as many as are too many then. Returns the totals."""

LOAD = (
    _COMMON
    + """
-- ARGV: prefix, digest, ttl
local digest, ttl = ARGV[2], tonumber(ARGV[3])
local value = redis.call('GET', prefix..digest)
if not value then
  forget(digest)
  return false
end
if redis.call('ZSCORE', used, digest) then
  redis.call('ZADD', used, now, digest)
  local depth, session, standing = parts(digest)
  if standing == 0 or standing == 2 then standing = 1 end
  if standing == 1 then
    idle(digest, depth, session, now)
  else
    redis.call('ZADD', order, place(standing, depth, now, 0), digest)
  end
  redis.call('EXPIRE', prefix..digest, ttl)
  keep(ttl)
  return value
end
return value
"""
)
"""A block's value, and that it was used. What Redis itself has thrown away leaves the books."""

MARK = (
    _COMMON
    + """
-- ARGV: prefix, standing, seconds until what is foreseen, session, digests ...
local wanted, expected, session = tonumber(ARGV[2]), now + tonumber(ARGV[3]), ARGV[4]
local found = 0
for at = 5, #ARGV do
  local digest = ARGV[at]
  local last = redis.call('ZSCORE', used, digest)
  if last then
    found = found + 1
    local depth, before, standing = parts(digest)
    local shared = standing == 3 or (session ~= '0' and before ~= '0' and before ~= session)
    if session ~= '0' then before = session end
    standing = wanted
    if shared and wanted ~= 4 then standing = 3 end
    last = tonumber(last)
    if wanted >= 1 then
      last = now
      redis.call('ZADD', used, now, digest)
    end
    redis.call('HSET', meta, digest, string.format('%d %s %d', depth, before, standing))
    redis.call('ZADD', order, place(standing, depth, last, expected), digest)
    if standing == 2 or standing == 4 then
      redis.call('ZADD', until_, expected + math.max(expected - now, 1), digest)
    else
      redis.call('ZREM', until_, digest)
    end
  end
end
return found
"""
)
"""What blocks are worth from now on; how many of them are there."""

DROP = (
    _COMMON
    + """
-- ARGV: prefix, the total to count them in ('' for none), digests ...
local gone = 0
for at = 3, #ARGV do gone = gone + forget(ARGV[at]) end
if gone > 0 and ARGV[2] ~= '' then redis.call('HINCRBY', about, ARGV[2], gone) end
return {gone, unpack(totals())}
"""
)
"""Throws blocks away. How many were there, and the totals."""

SHRINK = (
    _COMMON
    + """
-- ARGV: prefix, bound, how many at most in one call
local left = math.max(tonumber(ARGV[2]), redis.call('ZCARD', used) - tonumber(ARGV[3]))
return shrink(left)
"""
)
"""Gives up blocks, those worth least first, until `bound` are left; how many went."""
