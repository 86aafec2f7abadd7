// The panel on the right: the selected buffer with its readers and writers, the selected node with its arguments, or all buffers.

const detail = document.getElementById("detail");

function bufferLink(buffer) {
  return make("a", { href: `#buffer=${buffer.name}`, onclick: event => { event.preventDefault(); select({ buffer }, { scroll: true }); } },
    make("i", { class: "swatch", style: `--c:${colour(buffer)}` }), buffer.name);
}

function nodeLink(node) {
  return make("a", { href: `#node=${node.label}`, onclick: event => { event.preventDefault(); showNode(node); } }, node.label);
}

function facts(pairs) {
  const cells = pairs.filter(([, value]) => value !== null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  return make("dl", {}, ...cells);
}

function ofBuffer(buffer) {
  const first = nodes[buffer.first].label, last = nodes[buffer.last].label;
  const list = (title, mask) => {
    const uses = buffer.uses.filter(use => use.access & mask);
    const items = uses.map(use => make("li", {}, nodeLink(nodes[use.node]), ` .${use.arg}`));
    return [make("h3", {}, `${title} (${uses.length})`), make("ol", { class: title.toLowerCase() }, ...items)];
  };
  return [
    make("h2", {}, make("i", { class: "swatch", style: `--c:${colour(buffer)}` }), buffer.name),
    make("p", {}, buffer.reason),
    facts([
      ["type", `${buffer.dtype} [${buffer.shape.join(", ")}]`],
      ["formula", buffer.formula],
      ["place", `${buffer.memory} + ${buffer.offset}`],
      ["size", `${bytes(buffer.bytes)} (${buffer.bytes} bytes)`],
      ["purpose", buffer.purpose.replace("_", " ")],
      ["used", first === last ? `by ${first}` : `from ${first} to ${last}`],
      ["holds", buffer.before ? (buffer.after ? "what was there before the step, and keeps it" : "what was there before the step")
        : buffer.after ? "what the step leaves behind" : "nothing outside these nodes"],
    ]),
    ...list("Writers", 2), ...list("Readers", 1),
  ];
}

function ofNode(node) {
  const rows = node.args.map(arg => {
    if (arg.buffer === undefined) return make("tr", {}, make("td", {}, arg.name), make("td", {}, arg.value === null ? "null" : arg.value), make("td"));
    const place = arg.offset ? ` + ${arg.offset}` : "";
    return make("tr", {},
      make("td", {}, arg.name),
      make("td", {}, bufferLink(buffers[arg.buffer]), place, make("small", {}, ` ${bytes(arg.extent)}`)),
      make("td", {}, ACCESS[arg.access]));
  });
  const before = edges.filter(edge => edge[1] === node.id).map(edge => nodes[edge[0]]);
  const after = edges.filter(edge => edge[0] === node.id).map(edge => nodes[edge[1]]);
  const links = list => (list.length ? make("span", {}, ...list.flatMap((node, at) => [at ? ", " : "", nodeLink(node)])) : "none");
  const speed = node.time && node.time.us > 0 ? ` (${(node.time.bytes / node.time.us / 1e3).toFixed(1)} GB/s declared)` : "";
  return [
    make("h2", {}, node.label),
    facts([
      ["number", String(node.id)],
      ["kernel", node.kernel],
      ["grid", node.grid.join(" × ")],
      ["workgroup", node.workgroup.join(" × ")],
      ["LDS", bytes(node.lds)],
      ["time", node.time ? `${node.time.us.toFixed(2)} µs${speed}` : null],
      ["after", links(before)],
      ["before", links(after)],
    ]),
    make("h3", {}, "Arguments"),
    make("table", {}, ...rows),
  ];
}

function ofAll() {
  const largest = [...buffers].sort((a, b) => b.bytes - a.bytes);
  const shown = largest.slice(0, 300);
  const rows = shown.map(buffer => make("tr", {}, make("td", {}, bufferLink(buffer)), make("td", { class: "number" }, bytes(buffer.bytes))));
  return [
    make("h2", {}, "Buffers"),
    make("p", {}, "Click a buffer, here, in the map or on a node, to light up what reads and writes it."),
    make("table", {}, ...rows),
    buffers.length > shown.length ? make("p", {}, `and ${buffers.length - shown.length} smaller ones: search for them`) : "",
  ];
}

views.push(() => {
  const content = selected.buffer ? ofBuffer(selected.buffer) : selected.node ? ofNode(selected.node) : ofAll();
  const close = make("button", { type: "button", id: "close", onclick: () => select({}) }, "Close");
  detail.replaceChildren(...(selected.buffer || selected.node ? [close] : []), ...content);
  detail.scrollTop = 0;
});
