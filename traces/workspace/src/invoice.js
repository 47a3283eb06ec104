const VAT = 0.07; // coffee is food

export function invoiceText(order) {
  const net = Math.round(order.total / (1 + VAT));
  const rows = order.lines.map((line) => `${line.quantity} x ${line.sku}  ${euros(line.unitPrice * line.quantity)}`);
  return [
    `Invoice ${order.id}`,
    ...rows,
    `Net   ${euros(net)}`,
    `VAT   ${euros(order.total - net)}`,
    `Total ${euros(order.total)}`,
  ].join("\n");
}

export function euros(cents) {
  return `${(cents / 100).toFixed(2)} EUR`;
}
