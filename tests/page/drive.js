// What a person would do with the page, and what shows then: one line a step, read by tests/page.rs. It stands at the end of
// the page, so the page's own names are in scope.
const report = [];
const say = (what, value) => report.push(`${what}: ${value}`);
const count = selector => document.querySelectorAll(selector).length;
const labels = selector => [...document.querySelectorAll(selector)].map(row => row.dataset.node !== undefined
  ? nodes[row.dataset.node].label : `layer ${row.dataset.layer}`).join(" ");
const click = selector => document.querySelector(selector).click();

say("nodes", nodes.length);
say("rows folded", count(".row"));
say("layers", count(".row.layer"));
click(`.row.layer[data-layer="1"]`);
say("nodes of layer 1", count(".row.inner"));
click("#unfold");
say("rows unfolded", count(".row"));
say("edges drawn", document.querySelector("#edges path").getAttribute("d").length > 0);
click("#fold");

// A buffer, by a click on its chip at a node.
click("#unfold");
const chip = [...document.querySelectorAll(".chip")].find(chip => chip.title.includes("= attention.page_table "));
chip.click();
say("selected", document.querySelector("#detail h2").textContent);
say("lit writers", labels(".row.node.writes"));
say("lit readers", labels(".row.node.reads"));
say("listed writers", count("#detail ol.writers li"));
say("listed readers", count("#detail ol.readers li"));
say("others dim", getComputedStyle(document.querySelector(".row.node:not(.reads):not(.writes)")).opacity < 1);
say("address", location.hash);

// The same buffer in the map: the middle of its bar.
select({});
say("nothing lit", count(".row.reads, .row.writes"));
drawMap();
const barOf = name => bars.find(bar => bar.buffer.name === name);
const box = canvas.getBoundingClientRect();
const mouse = (kind, y, more = {}) => new kind(kind === WheelEvent ? "wheel" : "click",
  { clientX: box.left + 300, clientY: Math.round(box.top + y), bubbles: true, cancelable: true, ...more });
say("bars inside the map", bars.every(bar => bar.y >= 0 && bar.y + bar.height <= box.height + 1));
// As large as a finger, by the wheel.
for (let turns = 0; turns < 60 && barOf("attention.page_table").height < 8; turns += 1) {
  const { y, height } = barOf("attention.page_table");
  canvas.dispatchEvent(mouse(WheelEvent, y + height / 2, { deltaY: -100 }));
}
say("zoomed", barOf("attention.page_table").height >= 8);
const bar = barOf("attention.page_table");
canvas.dispatchEvent(mouse(MouseEvent, bar.y + bar.height / 2));
say("selected in the map", selected.buffer && selected.buffer.name);
const pixel = bar => canvas.getContext("2d").getImageData(
  Math.round(xOf(bar.buffer.first + 0.5, box.width) * devicePixelRatio), Math.round((bar.y + bar.height / 2) * devicePixelRatio), 1, 1).data[3];
say("its bar is drawn", pixel(bar) > 0);
say("lifetime", `${nodes[selected.buffer.first].label} ${nodes[selected.buffer.last].label}`);

// Search.
const type = text => { search.value = text; search.dispatchEvent(new Event("input")); };
type("layer1.attend");
say("hits", [...hits.querySelectorAll("li")].filter(item => item.textContent.startsWith("node")).length);
type("no such thing");
say("no hit", hits.textContent);
click("#fold");
type("layer1.attend");
search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
say("found", labels(".row.node.chosen"));
say("its arguments", count("#detail table tr"));
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
say("after Escape", document.querySelector("#detail h2").textContent);

const start = performance.now();
setAll(true);
document.body.offsetHeight;
say("unfold ms", Math.round(performance.now() - start));
say("errors", errors.join("; ") || "none");
document.body.replaceChildren(Object.assign(document.createElement("pre"), { id: "report", textContent: report.join("\n") }));
