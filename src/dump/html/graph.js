// The graph: a row a node or a folded layer, edges in the gutter. Rows have one height, so edges need no measuring.

const ROW = 26, GUTTER = 64;
const list = document.getElementById("list"), edgeLayer = document.getElementById("edges");
// Visible rows: {group} folded or heading, or {node}.
let rows = [];

function layRows() {
  rows = [];
  for (const group of groups) {
    if (group.layer !== null) rows.push({ group });
    if (group.open) for (const node of group.nodes) rows.push({ group, node });
  }
  list.replaceChildren(...rows.map(row => (row.node ? nodeRow(row.node) : layerRow(row.group))));
  drawEdges();
  light(false);
}

function layerRow(group) {
  const kernels = [...new Set(group.nodes.map(node => node.kernel))];
  const time = group.nodes[0].time ? `${group.nodes.reduce((sum, node) => sum + node.time.us, 0).toFixed(1)} µs` : null;
  return make("div", {
    class: "row layer", "data-layer": group.layer, "data-group": group.id, role: "button", tabindex: 0,
    "aria-expanded": String(group.open), onclick: () => toggle(group),
    onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(group); } },
  },
    make("span", { class: "turn" }, group.open ? "▾" : "▸"),
    make("b", {}, `layer ${group.layer}`),
    make("span", { class: "count" }, `${group.nodes.length} nodes`),
    make("span", { class: "time" }, time || ""),
    make("span", { class: "touch" }),
    make("span", { class: "kernels" }, kernels.join(" · ")));
}

function nodeRow(node) {
  const chips = [];
  for (const arg of node.args) {
    if (arg.buffer === undefined) continue;
    const buffer = buffers[arg.buffer];
    chips.push(make("i", {
      class: `chip ${ACCESS[arg.access]}`, style: `--c:${colour(buffer)}`, "data-buffer": buffer.id,
      title: `${arg.name} = ${buffer.name} (${ACCESS[arg.access]})`,
    }));
  }
  const label = node.layer === null ? node.label : node.label.replace(/^layer\d+\./, "");
  return make("div", {
    class: `row node${node.layer === null ? "" : " inner"}`, "data-node": node.id, role: "button", tabindex: 0,
    onclick: event => {
      const chip = event.target.closest(".chip");
      select(chip ? { buffer: buffers[chip.dataset.buffer] } : { node });
    },
    onkeydown: event => { if (event.key === "Enter") select({ node }); },
  },
    make("b", {}, label),
    make("span", { class: "kernel" }, node.kernel === label ? "" : node.kernel),
    make("span", { class: "shape" }, node.grid.join("×")),
    make("span", { class: "time" }, node.time ? `${node.time.us.toFixed(1)} µs` : ""),
    make("span", { class: "touch" }),
    make("span", { class: "chips" }, ...chips));
}

function toggle(group) {
  group.open = !group.open;
  layRows();
}

function setAll(open) {
  for (const group of groups) if (group.layer !== null) group.open = open;
  layRows();
}

function drawEdges() {
  // The row that stands for each node: its own, or its folded layer's.
  const at = new Int32Array(nodes.length);
  rows.forEach((row, index) => {
    if (row.node) at[row.node.id] = index;
    else if (!row.group.open) for (const node of row.group.nodes) at[node.id] = index;
  });
  const headings = rows.map(row => !row.node && row.group.open);
  const seen = new Set(), paths = [], x = GUTTER - 12;
  for (const [before, after] of edges) {
    const from = at[before], to = at[after];
    if (from === to || seen.has(from * 65536 + to)) continue;
    seen.add(from * 65536 + to);
    let next = from + 1;
    while (next < to && headings[next]) next += 1;
    const y0 = from * ROW + ROW / 2, y1 = to * ROW + ROW / 2;
    if (next === to) paths.push(`M${x} ${y0 + 4}V${y1 - 4}`);
    else {
      const bend = x - Math.min(GUTTER - 16, 10 + 6 * Math.abs(to - from));
      paths.push(`M${x - 3} ${y0}C${bend} ${y0} ${bend} ${y1} ${x - 3} ${y1}`);
    }
  }
  edgeLayer.setAttribute("width", GUTTER);
  edgeLayer.setAttribute("height", rows.length * ROW);
  const dots = rows.map((row, index) =>
    headings[index] ? "" : `<circle cx="${x}" cy="${index * ROW + ROW / 2}" r="${row.node ? 3 : 4}"/>`);
  edgeLayer.innerHTML = `<path d="${paths.join("")}"/>${dots.join("")}`;
}

// Lights the readers and writers of the selected buffer, or the selected node.
function light(scroll) {
  let first = null;
  for (const element of list.children) {
    const node = element.dataset.node === undefined ? null : nodes[element.dataset.node];
    const members = node ? [node] : groups[element.dataset.group].nodes;
    const found = members.map(touches).join("");
    const how = (found.includes("r") ? "r" : "") + (found.includes("w") ? "w" : "");
    const chosen = selected.node && (node === selected.node || (!node && members.includes(selected.node)));
    element.classList.toggle("reads", how.includes("r"));
    element.classList.toggle("writes", how.includes("w"));
    element.classList.toggle("chosen", Boolean(chosen));
    element.querySelector(".touch").textContent = how;
    if (!first && (how || chosen)) first = element;
  }
  for (const chip of list.querySelectorAll(".chip.on")) chip.classList.remove("on");
  if (selected.buffer) {
    for (const chip of list.querySelectorAll(`.chip[data-buffer="${selected.buffer.id}"]`)) chip.classList.add("on");
  }
  document.body.classList.toggle("lit", Boolean(selected.buffer));
  if (scroll && first) first.scrollIntoView({ block: "center" });
}

// Unfolds a node's layer and shows it.
function showNode(node) {
  if (!node.group.open) { node.group.open = true; layRows(); }
  select({ node }, { scroll: true });
}

views.push(light);
