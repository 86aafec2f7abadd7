// The memory map: nodes from left to right, slab offsets from top to bottom, a bar a buffer.

const canvas = document.getElementById("canvas"), tip = document.getElementById("tip");
const kindPicker = document.getElementById("kind"), scaleBox = document.getElementById("scale");
const LABELS = 132, RULER = 18;
// Bars as drawn, in CSS pixels: {buffer, y, height}.
let bars = [];

const kinds = [...new Set(buffers.map(buffer => buffer.memory))];
for (const kind of kinds) {
  const own = buffers.filter(buffer => buffer.memory === kind);
  const total = own.reduce((sum, buffer) => sum + buffer.bytes, 0);
  kindPicker.append(make("option", { value: kind }, `${kind}: ${own.length} buffers, ${bytes(total)}`));
}
kindPicker.value = kinds.includes("device") ? "device" : kinds[0];

// The part of the slab in view, as shares of the map's height; the wheel narrows and moves it.
let view = { from: 0, to: 1 };

// Bars as shares of the whole height. Not to scale, heights grow with the logarithm of the size, so that small buffers can be
// seen beside large ones.
function shares() {
  const own = buffers.filter(buffer => buffer.memory === kindPicker.value).sort((a, b) => a.offset - b.offset);
  const last = own[own.length - 1], end = last ? last.offset + last.bytes : 1;
  if (scaleBox.checked) return own.map(buffer => ({ buffer, from: buffer.offset / end, share: buffer.bytes / end }));
  const weights = own.map(buffer => 1 + Math.log2(1 + buffer.bytes / 64));
  const sum = weights.reduce((a, b) => a + b, 0);
  let from = 0;
  return own.map((buffer, at) => {
    const bar = { buffer, from, share: weights[at] / sum };
    from += bar.share;
    return bar;
  });
}

function layBars() {
  const height = document.getElementById("map").clientHeight - RULER - 4, zoom = 1 / (view.to - view.from);
  bars = shares().map(({ buffer, from, share }) => ({
    buffer, y: RULER + (from - view.from) * zoom * height, height: Math.max(0.5, share * zoom * height),
  }));
}

// Moves the view so that `from` is at its top, inside the slab.
function look(from, size) {
  size = Math.min(1, Math.max(size, 1e-6));
  from = Math.min(1 - size, Math.max(0, from));
  view = { from, to: from + size };
}

// A selected bar that is out of view comes to its middle.
function lookAtSelected() {
  const bar = selected.buffer && shares().find(bar => bar.buffer === selected.buffer);
  if (bar && (bar.from + bar.share < view.from || bar.from > view.to)) {
    const size = view.to - view.from;
    look(bar.from + bar.share / 2 - size / 2, size);
  }
}

function xOf(node, width) {
  return LABELS + node / nodes.length * (width - LABELS);
}

function drawMap() {
  layBars();
  const box = document.getElementById("map"), width = box.clientWidth, height = box.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const ink = style.getPropertyValue("--ink"), faint = style.getPropertyValue("--faint");
  draw.scale(ratio, ratio);
  draw.font = "11px system-ui, sans-serif";
  ruler(draw, width, height, ink, faint);
  const cell = (width - LABELS) / nodes.length;
  let labelled = -Infinity;
  draw.beginPath();
  draw.rect(0, RULER, width, height - RULER);
  draw.clip();
  for (const { buffer, y, height } of bars) {
    if (y + height < RULER || y > box.clientHeight) continue;
    const dim = selected.buffer ? (selected.buffer === buffer ? 1 : 0.18)
      : selected.node && !buffer.uses.some(use => use.node === selected.node.id) ? 0.18 : 1;
    const gap = height > 3 ? 0.5 : 0;
    const from = xOf(buffer.first, width), to = xOf(buffer.last + 1, width);
    draw.fillStyle = colour(buffer, 0.13 * dim);
    const pale = [buffer.before ? LABELS : from, buffer.after ? width : to];
    draw.fillRect(pale[0], y, pale[1] - pale[0], height - gap);
    draw.fillStyle = colour(buffer, 0.42 * dim);
    draw.fillRect(from, y, Math.max(1, to - from), height - gap);
    draw.fillStyle = colour(buffer, dim);
    for (const use of buffer.uses) draw.fillRect(xOf(use.node, width), y, Math.max(1, cell), height - gap);
    const wanted = selected.buffer === buffer;
    if ((height >= 11 && y - labelled >= 0) || wanted) {
      draw.fillStyle = wanted || dim === 1 ? ink : faint;
      draw.fillText(buffer.name, 4, Math.max(RULER + 10, y + height / 2 + 4), LABELS - 8);
      labelled = y + height;
    }
  }
}

// Layers along the top, and a line where the selected node is.
function ruler(draw, width, height, ink, faint) {
  let labelled = -Infinity;
  draw.fillStyle = ink;
  for (const group of groups) {
    const x = xOf(group.nodes[0].id, width);
    if (group.layer === null || x - labelled < 28) continue;
    draw.fillText(String(group.layer), x, 12);
    draw.fillStyle = faint;
    draw.fillRect(x, RULER, 0.5, height);
    draw.fillStyle = ink;
    labelled = x;
  }
  draw.fillText("layer", 4, 12);
  if (selected.node) draw.fillRect(xOf(selected.node.id + 0.5, width), RULER - 4, 1, height);
}

function barAt(event) {
  const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
  // The smallest bar at that height, and one a pixel away: bars can be thin.
  const near = bars.filter(bar => y >= bar.y - 1 && y <= bar.y + bar.height + 1);
  near.sort((a, b) => Math.abs(y - a.y - a.height / 2) - Math.abs(y - b.y - b.height / 2));
  return near[0] && near[0].buffer;
}

canvas.addEventListener("click", event => {
  const buffer = barAt(event);
  select(buffer && buffer !== selected.buffer ? { buffer } : {}, { scroll: true });
});
canvas.addEventListener("mousemove", event => {
  const buffer = barAt(event), box = canvas.getBoundingClientRect();
  tip.hidden = !buffer;
  if (!buffer) return;
  tip.textContent = `${buffer.name}  ${bytes(buffer.bytes)}  ${nodes[buffer.first].label} … ${nodes[buffer.last].label}`;
  const x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = `${Math.min(x + 14, Math.max(0, box.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 34 > box.height ? y - 30 : y + 14}px`;
});
canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const height = document.getElementById("map").clientHeight - RULER - 4, size = view.to - view.from;
  const at = (event.clientY - canvas.getBoundingClientRect().top - RULER) / height;
  if (event.shiftKey) look(view.from + Math.sign(event.deltaX || event.deltaY) * size * 0.1, size);
  else {
    const next = size * (event.deltaY > 0 ? 1.25 : 0.8);
    look(view.from + at * (size - Math.min(1, next)), next);
  }
  drawMap();
}, { passive: false });
for (const choice of [kindPicker, scaleBox]) {
  choice.addEventListener("change", () => { view = { from: 0, to: 1 }; drawMap(); });
}
new ResizeObserver(drawMap).observe(document.getElementById("map"));

const legend = document.getElementById("legend");
for (const purpose of Object.keys(HUES)) {
  const sample = buffers.find(buffer => buffer.purpose === purpose);
  if (sample) legend.append(make("span", {}, make("i", { style: `background:hsl(${HUES[purpose]} 65% 50%)` }), purpose.replace("_", " ")));
}

views.push(() => {
  if (selected.buffer && kindPicker.value !== selected.buffer.memory) {
    kindPicker.value = selected.buffer.memory;
    view = { from: 0, to: 1 };
  }
  lookAtSelected();
  drawMap();
});
