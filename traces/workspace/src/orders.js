import { orderTotal } from "./pricing.js";
import { reserve, commit } from "./stock.js";
import { invoiceText } from "./invoice.js";

let nextNumber = 1001;

export function placeOrder({ customer, lines, zone, code }) {
  if (lines.length === 0) throw new Error("an order has at least one line");
  const id = `HL-${nextNumber++}`;
  for (const line of lines) {
    if (!reserve(id, line.sku, line.quantity)) {
      throw new Error(`not enough ${line.sku} in stock`);
    }
  }
  return { id, customer, lines, zone, total: orderTotal(lines, zone, code), state: "reserved" };
}

export function pay(order) {
  commit(order.id);
  order.state = "paid";
  return invoiceText(order);
}
