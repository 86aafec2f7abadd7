// Title, search, keys, and the start.

document.getElementById("title").textContent = data.chain;
const key = data.key, total = buffers.reduce((sum, buffer) => sum + buffer.bytes, 0);
document.getElementById("figures").textContent = [
  `${data.rows} rows`, `query length ${key.query_len}`, `KV length up to ${key.kv_len_max}`,
  ...(key.world > 1 ? [`rank ${key.rank} of ${key.world}`] : []),
  `${nodes.length} nodes`, `${buffers.length} buffers, ${bytes(total)}`,
  ...(data.device ? [`${data.device.name}: ${data.device.nodes.reduce((sum, node) => sum + node.us, 0).toFixed(0)} µs in nodes`] : []),
].join(" · ");

const search = document.getElementById("search"), hits = document.getElementById("hits");
const HITS = 60;
let found = [];

function runSearch() {
  const words = search.value.toLowerCase().split(/\s+/).filter(word => word);
  const matches = text => words.every(word => text.includes(word));
  found = !words.length ? [] : [
    ...buffers.filter(buffer => matches(buffer.name.toLowerCase())).map(buffer => ({ buffer })),
    ...nodes.filter(node => matches(`${node.label} ${node.kernel}`.toLowerCase())).map(node => ({ node })),
  ];
  const items = found.slice(0, HITS).map(hit => make("li", { onmousedown: event => { event.preventDefault(); go(hit); } },
    make("small", {}, hit.buffer ? "buffer" : "node"),
    hit.buffer ? make("i", { class: "swatch", style: `--c:${colour(hit.buffer)}` }) : null,
    hit.buffer ? hit.buffer.name : hit.node.label,
    make("small", { class: "right" }, hit.buffer ? bytes(hit.buffer.bytes) : hit.node.kernel)));
  if (found.length > HITS) items.push(make("li", { class: "more" }, `and ${found.length - HITS} more`));
  if (words.length && !found.length) items.push(make("li", { class: "more" }, "nothing found"));
  hits.replaceChildren(...items);
  hits.hidden = !words.length;
}

function go(hit) {
  hits.hidden = true;
  search.blur();
  if (hit.node) showNode(hit.node);
  else select(hit, { scroll: true });
}

search.addEventListener("input", runSearch);
search.addEventListener("focus", runSearch);
search.addEventListener("blur", () => { hits.hidden = true; });
search.addEventListener("keydown", event => {
  if (event.key === "Enter" && found.length) go(found[0]);
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); search.select(); }
  if (event.key === "Escape") { search.value = ""; search.blur(); select({}); }
});
document.getElementById("unfold").addEventListener("click", () => setAll(true));
document.getElementById("fold").addEventListener("click", () => setAll(false));

// A link to a node or buffer: #node=layer0.score, #buffer=attention.q.
function fromHash() {
  const [what, name] = decodeURIComponent(location.hash.slice(1)).split(/=(.*)/s);
  const node = what === "node" && nodes.find(node => node.label === name);
  const buffer = what === "buffer" && buffers.find(buffer => buffer.name === name);
  if (node) showNode(node);
  else select(buffer ? { buffer } : {}, { scroll: true });
}
window.addEventListener("hashchange", fromHash);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { layRows(); select(selected); });

layRows();
fromHash();
