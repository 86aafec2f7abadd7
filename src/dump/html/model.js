// The dump as objects, lookups between nodes and buffers, and what is selected.

const data = JSON.parse(document.getElementById("data").textContent);

const buffers = data.buffers.map(([name, dtype, shape, formula, purpose, reason, [memory, offset, bytes]], id) => ({
  id, name, dtype, shape, formula, purpose, reason, memory, offset, bytes,
  // Uses in recording order: {node, arg, access}; access 1 reads, 2 writes, 3 both.
  uses: [],
}));

const nodes = data.nodes.map(([label, layer, kernel, [grid, workgroup, lds], values], id) => {
  const [symbol, fields] = data.kernels[kernel];
  const args = values.map((value, at) => {
    if (!Array.isArray(value)) return { name: fields[at], value };
    const [buffer, offset, extent, access] = value;
    buffers[buffer].uses.push({ node: id, arg: fields[at], access });
    return { name: fields[at], buffer, offset, extent, access };
  });
  const time = data.device && data.device.nodes[id];
  return { id, label, layer, kernel: symbol, grid, workgroup, lds, args, time };
});

const edges = data.edges || nodes.slice(1).map((_, at) => [at, at + 1]);

// A buffer lives from its first writer to its last reader. What the first use reads came from before the step; what the last
// use writes stays for the next.
for (const buffer of buffers) {
  const { uses } = buffer;
  const reads = uses.filter(use => use.access & 1), writes = uses.filter(use => use.access & 2);
  buffer.first = uses[0].node;
  buffer.last = uses[uses.length - 1].node;
  buffer.before = !writes.length || (reads.length > 0 && reads[0].node <= writes[0].node);
  buffer.after = !reads.length || !writes.length || writes[writes.length - 1].node >= reads[reads.length - 1].node;
}

// Runs of nodes of one layer; nodes of no layer stand alone.
const groups = [];
for (const node of nodes) {
  const last = groups[groups.length - 1];
  if (node.layer !== null && last && last.layer === node.layer) last.nodes.push(node);
  else groups.push({ id: groups.length, layer: node.layer, nodes: [node], open: node.layer === null });
  node.group = groups[groups.length - 1];
}

const ACCESS = { 1: "r", 2: "w", 3: "rw" };

// One hue a purpose; buffers of a purpose differ a little.
const HUES = {
  weights: 215, kv_cache: 25, index_cache: 50, metadata: 275, activations: 145, selection: 180, rings: 330, exchange: 0,
  workspace: 95,
};
function hue(buffer) {
  return (HUES[buffer.purpose] ?? 0) + (buffer.id * 7) % 18 - 9;
}
function colour(buffer, alpha = 1) {
  return `hsl(${hue(buffer)} 65% ${matchMedia("(prefers-color-scheme: dark)").matches ? 58 : 44}% / ${alpha})`;
}

function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// An element: make("b", {class: "x"}, "text", child).
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// What is selected: {buffer} or {node} or nothing; views redraw on change.
let selected = {};
const views = [];
function select(what, { scroll = false } = {}) {
  selected = what;
  const hash = what.buffer ? `#buffer=${what.buffer.name}` : what.node ? `#node=${what.node.label}` : "";
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
  for (const view of views) view(scroll);
}

// What a node does to the selected buffer: "", "r", "w", "rw".
function touches(node) {
  if (!selected.buffer) return "";
  let access = 0;
  for (const use of selected.buffer.uses) if (use.node === node.id) access |= use.access;
  return ACCESS[access] || "";
}
