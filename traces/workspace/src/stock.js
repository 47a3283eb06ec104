// Stock and reservations, in bags. One process, so plain maps do.
const HOLD_MS = 30 * 60 * 1000;
const stock = new Map();
const holds = new Map();

export function setStock(sku, bags) {
  stock.set(sku, bags);
}

export function available(sku, now = Date.now()) {
  let held = 0;
  for (const hold of holds.values()) {
    if (hold.sku === sku && hold.until > now) held += hold.bags;
  }
  return (stock.get(sku) ?? 0) - held;
}

export function reserve(orderId, sku, bags, now = Date.now()) {
  if (available(sku, now) < bags) return false;
  holds.set(orderId, { sku, bags, until: now + HOLD_MS });
  return true;
}

export function commit(orderId) {
  const hold = holds.get(orderId);
  if (!hold) throw new Error(`order ${orderId} holds nothing`);
  stock.set(hold.sku, stock.get(hold.sku) - hold.bags);
  holds.delete(orderId);
}
