// Totals in cents: floats lose cents.
const SHIPPING = {
  home: { price: 390, freeFrom: 3900 },
  near: { price: 750, freeFrom: 6500 },
  far: { price: 1190, freeFrom: 9500 },
};

export function goodsTotal(lines) {
  return lines.reduce((sum, line) => sum + line.unitPrice * line.quantity, 0);
}

export function discount(total, code) {
  if (code === "FIRSTCUP") return Math.round(total * 0.1);
  if (code === "HARBOUR5" && total >= 2500) return 500;
  return 0;
}

export function shipping(total, zone) {
  const rule = SHIPPING[zone];
  if (!rule) throw new Error(`no shipping zone ${zone}`);
  return total > rule.freeFrom ? 0 : rule.price;
}

export function orderTotal(lines, zone, code) {
  const goods = goodsTotal(lines);
  const off = discount(goods, code);
  return goods - off + shipping(goods, zone);
}
