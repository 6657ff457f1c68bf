// @ts-check
// Draws the page from the JSON that stands in it. Nothing of the data is ever parsed as HTML: text goes in as text.
"use strict";

const COLOURS = 8; // how many --series-N the style sheet has
const root = document.documentElement;
const byId = (/** @type {string} */ id) => document.getElementById(id);
const tooltip = byId("tooltip");
const data = JSON.parse(byId("data").textContent);
const allRuns = data.runs || [];
const runById = new Map(allRuns.map((run) => [run.id, run]));

// ---------------------------------------------------------------------------------------------- elements and numbers

const none = (value) => value === null || value === undefined;

/** Give an element attributes, listeners (`onclick`) and children; what is null or false is left out. */
function filled(element, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (!none(value) && value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(3).filter((child) => !none(child) && child !== false));
  return element;
}

/** An HTML element. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** A number with so many digits, a dash for none. */
function fixed(value, digits = 2) {
  return none(value) ? "–" : Number(value).toFixed(digits).replace("-", "−");
}

/** A difference, always with a sign: colour is not to be the only cue. */
function signed(value) {
  if (none(value)) return "";
  const digits = Math.abs(value).toFixed(2);
  return (Number(digits) === 0 ? "±" : value < 0 ? "−" : "+") + digits;
}

/** A number as short as it can be said, for ticks. */
function short(value) {
  return String(Number(Number(value).toPrecision(6))).replace("-", "−");
}

function counted(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Call with the width of a box now and whenever it changes: text in a drawing must not scale with it. */
function whenSized(box, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== last) draw((last = width));
  }).observe(box);
}

// -------------------------------------------------------------------------------------------------------------- theme

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const paints = new Set(); // what to paint again in another theme: a canvas cannot hold CSS variables

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
}

/** Say on the button what a click does, and paint canvases anew. */
function themeChanged() {
  const other = isDark() ? "light" : "dark";
  filled(byId("theme"), { "aria-label": `Use the ${other} theme`, title: `Use the ${other} theme` });
  for (const paint of paints) paint();
}

function useTheme(theme) {
  root.dataset.theme = theme;
  themeChanged();
}

function toggleTheme() {
  useTheme(isDark() ? "light" : "dark");
  try {
    localStorage.setItem("equipoise-theme", root.dataset.theme);
  } catch {
    // A browser that keeps nothing for file:// still shows the theme until the page is left.
  }
}

/** Paper is white: print in the light theme, with every matrix drawn, and go back to what was chosen. */
function forPrint() {
  const chosen = root.dataset.theme || "";
  addEventListener("afterprint", () => useTheme(chosen), { once: true });
  for (const place of [...waiting.keys()]) arrive(place);
  useTheme("light");
}

// ------------------------------------------------------------------------------------------------ tooltip and copying

/** Show lines beside a point of the window, and inside it. */
function showTooltip(x, y, ...lines) {
  tooltip.replaceChildren(...lines);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 16 + width > root.clientWidth - 8 ? x - width - 16 : x + 16;
  const top = y - height - 12 < 8 ? y + 20 : y - height - 12;
  tooltip.style.left = `${Math.max(8, Math.min(left, root.clientWidth - width - 8))}px`;
  tooltip.style.top = `${top}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

/** Show values where a pointer is or where the arrow keys move to; a finger that is lifted leaves them there. */
function explore(target, { at, move, leave }) {
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const gone = () => (leave(), hideTooltip());
  const pointed = (event) => {
    const { left, top } = target.getBoundingClientRect();
    at(event.clientX - left, event.clientY - top, event.clientX, event.clientY);
  };
  filled(target, {
    tabindex: 0,
    onpointermove: pointed,
    onpointerdown: pointed,
    onpointerleave: (event) => event.pointerType === "mouse" && gone(),
    onblur: gone,
    onkeydown: (event) => {
      if (event.key === "Escape") gone();
      if (!(event.key in arrows)) return;
      event.preventDefault(); // the arrows would scroll the page
      const { left, top } = target.getBoundingClientRect();
      move(...arrows[event.key], left, top);
    },
  });
}

/** Copy by the way that works where this page lies: the clipboard's interface may be refused, to a file above all. */
async function copied(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return document.execCommand("copy"); // old, but allowed where the other is not; else the text stays selected
  }
}

/** A command to run again, with a button that copies it. */
function commandBox(command) {
  if (!command) return null;
  const code = h("code", {}, command);
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(command, code)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2500);
  });
  return h("div", { class: "command" }, code, button);
}

// ------------------------------------------------------------------------------------------------------------- scales

/** Where in [0, 1] a value lies between two. */
function scaleOf(axis, low, high) {
  const t = axis.threshold || 1;
  const forms = { log: Math.log10, symlog: (v) => (v <= t ? v / t : 1 + Math.log10(v / t)) };
  const form = forms[axis.scale] || Number;
  const [start, end] = [form(low), form(high)];
  return (value) => (start === end ? 0.5 : (form(value) - start) / (end - start));
}

/** Round numbers from at most `low` to at least `high`, about `count` of them. */
function roundTicks(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((k) => k * power >= rough) || 10);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Ticks of a horizontal axis within its values: those given, else powers of ten, else round numbers. */
function ticksOf(axis, low, high) {
  if (axis.ticks && axis.ticks.length) return axis.ticks.filter((v) => v >= low && v <= high);
  if (!["log", "symlog"].includes(axis.scale)) return roundTicks(low, high, 6).filter((v) => v >= low && v <= high);
  const start = axis.scale === "log" ? low : axis.threshold || 1;
  const within = (v) => v >= start * 0.999 && v <= high * 1.001;
  const powers = [];
  for (let k = Math.floor(Math.log10(start)); k <= Math.log10(high) + 1e-9; k++) powers.push(10 ** k);
  const few = powers.filter(within).length < 3; // less than two decades
  const ticks = (few ? powers.flatMap((p) => [p, 2 * p, 5 * p]) : powers).filter(within);
  return axis.scale === "log" ? ticks : [0, start, ...ticks.filter((v) => v > start * 1.001)].filter((v) => v >= low);
}

/** Leave out labels that would touch the one before. */
function apart(ticks) {
  let end = -Infinity;
  return ticks.filter(({ px, label }) => {
    const half = label.length * 3.7 + 4;
    const free = px - half >= end;
    if (free) end = px + half;
    return free;
  });
}

// -------------------------------------------------------------------------------------------------------- line charts

/** The mark of a series: shape as well as colour tells lines apart. */
function marker(group, x, y, r = 3.6) {
  const shapes = [
    () => s("circle", { cx: x, cy: y, r }),
    () => s("rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8 }),
    () => s("path", { d: `M${x},${y - r * 1.2}l${r * 1.15},${r * 2}h${-r * 2.3}z` }),
    () => s("path", { d: `M${x},${y - r * 1.3}l${r * 1.3},${r * 1.3}l${-r * 1.3},${r * 1.3}l${-r * 1.3},${-r * 1.3}z` }),
  ];
  return filled(shapes[(group + Math.floor(group / COLOURS)) % shapes.length](), { class: "mark" });
}

function colourOf(series) {
  return `--ink: var(--series-${series.group % COLOURS})`;
}

/** A short piece of a series' line, for legends. */
function swatch(series) {
  return s("svg", { width: 26, height: 12, "aria-hidden": "true", style: colourOf(series) },
    s("line", { x1: 1, y1: 6, x2: 25, y2: 6, class: series.dashed ? "line dashed" : "line" }),
    marker(series.group, 13, 6));
}

/** A chart with a legend that shows and hides its lines. */
function lineChart(figure) {
  const every = (figure.series || []).map((series, i) => ({ ...series, group: series.group ?? i }));
  const hidden = new Set();
  const plot = h("div", { class: "plot" });
  let width = 0;
  const draw = () => plot.replaceChildren(linePlot(figure, every, hidden, width));
  const legend = every.map((series) => {
    const toggle = () => {
      if (!hidden.delete(series)) hidden.add(series);
      button.setAttribute("aria-pressed", String(!hidden.has(series)));
      draw();
    };
    const attributes = { type: "button", "aria-pressed": "true", title: "Show or hide", onclick: toggle };
    const button = h("button", attributes, swatch(series), h("span", {}, series.name));
    return button;
  });
  whenSized(plot, (now) => ((width = now), draw()));
  return h("div", { class: "chart" }, plot, h("div", { class: "legend" }, legend));
}

/** The points of a series that its axis has a place for; a log axis has none for 0. */
function pointsOf(series, axis) {
  return series.x
    .map((x, i) => ({ series, x, y: series.y[i] ?? null, spread: series.spread?.[i] || 0 }))
    .filter(({ x }) => !none(x) && (axis.scale !== "log" || x > 0));
}

/** The SVG of a chart. The axes span all lines, so that hiding one moves nothing. */
function linePlot(figure, every, hidden, width) {
  const lines = every.map((series) => ({ series, points: pointsOf(series, figure.x) }));
  const known = lines.flatMap(({ points }) => points.filter((p) => p.y !== null));
  if (!known.length) return h("p", { class: "nothing" }, "Nothing measured yet.");
  const [low, high] = [Math.min(...known.map((p) => p.x)), Math.max(...known.map((p) => p.x))];
  const yTicks = roundTicks(Math.min(...known.map((p) => p.y - p.spread)), Math.max(...known.map((p) => p.y + p.spread)), 5);
  const height = Math.round(Math.min(360, Math.max(240, width * 0.6)));
  const left = 12 + 7.2 * Math.max(...yTicks.map((v) => short(v).length));
  const box = { left, right: width - 12, top: 32, bottom: height - 44 };
  const [xAt, yAt] = [scaleOf(figure.x, low, high), scaleOf({}, yTicks[0], yTicks[yTicks.length - 1])];
  const px = (x) => box.left + 8 + xAt(x) * (box.right - box.left - 16);
  const py = (y) => box.bottom - yAt(y) * (box.bottom - box.top);
  for (const p of lines.flatMap(({ points }) => points)) {
    Object.assign(p, { px: px(p.x), py: py(p.y), top: py(p.y + p.spread), bottom: py(p.y - p.spread) });
  }
  const shown = lines.filter(({ series }) => !hidden.has(series));
  const label = `${figure.title || "Chart"}: ${figure.y.label} by ${figure.x.label}`;
  const svg = s("svg", { class: "lines", width, height, role: "img", "aria-label": label },
    axes(figure, box, height, yTicks.map((v) => ({ py: py(v), label: short(v) })),
      ticksOf(figure.x, low, high).map((v) => ({ px: px(v), label: short(v) }))),
    shown.map(({ series, points }) => lineOf(series, points)));
  return showingValues(svg, figure, shown.flatMap(({ points }) => points.filter((p) => p.y !== null)), box);
}

/** Quiet lines across for y, ticks for x; the label of y lies flat above, where it can be read. */
function axes(figure, box, height, yTicks, xTicks) {
  return [
    yTicks.map((t) => [
      s("line", { class: "grid", x1: box.left, x2: box.right, y1: t.py, y2: t.py }),
      s("text", { class: "tick", x: box.left - 8, y: t.py + 4, "text-anchor": "end" }, t.label)]),
    xTicks.map((t) => s("line", { class: "axis", x1: t.px, x2: t.px, y1: box.bottom, y2: box.bottom + 5 })),
    apart(xTicks).map((t) =>
      s("text", { class: "tick", x: t.px, y: box.bottom + 19, "text-anchor": "middle" }, t.label)),
    s("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    s("text", { class: "label", x: 0, y: 14 }, figure.y.label),
    s("text", { class: "label", x: box.right, y: height - 6, "text-anchor": "end" }, figure.x.label),
  ];
}

/** One line with its band and marks; a value that is missing breaks it. */
function lineOf(series, points) {
  const pieces = [[]];
  for (const p of points) {
    if (p.y === null) pieces.push([]);
    else pieces[pieces.length - 1].push(p);
  }
  const along = (piece, y) => piece.map((p) => `${p.px},${p[y]}`).join(" ");
  return s("g", { class: "series", style: colourOf(series) }, pieces.filter((piece) => piece.length).map((piece) => [
    piece.some((p) => p.spread) &&
      s("polygon", { class: "band", points: `${along(piece, "top")} ${along([...piece].reverse(), "bottom")}` }),
    s("polyline", { class: series.dashed ? "line dashed" : "line", points: along(piece, "py") }),
    piece.map((p) => marker(series.group, p.px, p.py))]));
}

/** Values under the pointer: those of every line at the nearest x, and which of them is nearest. */
function showingValues(svg, figure, points, box) {
  const guide = s("g", { class: "guide" });
  const stops = [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
  const nearest = (some, distance) => some.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  let stop = -1;
  const show = (x, y, clientX, clientY) => {
    const here = points.filter((p) => p.x === x).sort((a, b) => b.y - a.y);
    const chosen = nearest(here, (p) => Math.abs(p.py - y));
    guide.replaceChildren(s("line", { x1: chosen.px, x2: chosen.px, y1: box.top, y2: box.bottom }), ...here.map((p) =>
      s("g", { style: colourOf(p.series) }, marker(p.series.group, p.px, p.py, p === chosen ? 6 : 4.6))));
    const rows = here.map((p) => h("tr", { class: p === chosen && "nearest" }, h("td", {}, swatch(p.series)),
      h("td", {}, p.series.name), h("td", { class: "number" }, fixed(p.y), p.spread ? ` ± ${fixed(p.spread)}` : "")));
    showTooltip(clientX, clientY, h("p", {}, `${figure.x.label}: ${short(x)}`), h("table", {}, rows));
  };
  svg.append(guide);
  if (!points.length) return svg;
  explore(svg, {
    at: (x, y, clientX, clientY) => {
      const closest = nearest(points, (p) => Math.abs(p.px - x));
      stop = stops.indexOf(closest.x);
      show(closest.x, y, clientX, clientY);
    },
    move: (dx, _, left, top) => {
      stop = Math.max(0, Math.min(stops.length - 1, stop + dx));
      const first = points.find((p) => p.x === stops[stop]);
      show(first.x, first.py, left + first.px, top + first.py);
    },
    leave: () => guide.replaceChildren(),
  });
  return svg;
}

/** The chart at the top: a ring for the paper, a dot for ours; where they agree the dot lies in the ring. */
function headlineChart(rows) {
  const values = rows.flatMap((r) => [r.paper, r.ours, none(r.ours) ? null : r.ours - (r.std || 0),
    none(r.ours) ? null : r.ours + (r.std || 0)]).filter((v) => !none(v));
  if (!values.length) return null;
  const ticks = roundTicks(Math.min(...values), Math.max(...values), 5);
  const at = scaleOf({}, ticks[0], ticks[ticks.length - 1]);
  const x = (value) => `${(100 * at(value)).toFixed(3)}%`;
  const grid = () => ticks.map((v) => s("line", { class: "grid", x1: x(v), x2: x(v), y1: 0, y2: "100%" }));
  const whisker = (r) => !none(r.ours) && r.std &&
    s("line", { class: "whisker", x1: x(r.ours - r.std), x2: x(r.ours + r.std), y1: "50%", y2: "50%" });
  const link = (r) => !none(r.ours) && !none(r.paper) &&
    s("line", { class: "link", x1: x(r.paper), x2: x(r.ours), y1: "50%", y2: "50%" });
  const track = (r) => s("svg", { "aria-hidden": "true" }, grid(), link(r), whisker(r),
    !none(r.paper) && s("circle", { class: "ring", cx: x(r.paper), cy: "50%", r: 6.5 }),
    !none(r.ours) && s("circle", { class: "dot", cx: x(r.ours), cy: "50%", r: 3.8 }));
  const measured = (r) => none(r.ours) ? h("span", { class: "quiet" }, "–") : [fixed(r.ours), deviation(r)];
  const difference = (r) => none(r.ours) || none(r.paper) ? "" : signed(r.ours - r.paper);
  const labels = s("svg", { "aria-hidden": "true" }, ticks.map((v, i) => s("text", { class: "tick", x: x(v), y: 14,
    "text-anchor": i === 0 ? "start" : i === ticks.length - 1 ? "end" : "middle" }, short(v))));
  const key = (shape, r, word) =>
    [s("svg", { width: 16, height: 16, "aria-hidden": "true" }, s("circle", { class: shape, cx: 8, cy: 8, r })), word];
  return h("table", { class: "headline" },
    h("thead", {}, h("tr", {}, h("td"), h("td", { class: "track" }), h("th", { scope: "col" }, key("dot", 3.8, "measured")),
      h("th", { scope: "col" }, key("ring", 6.5, "paper")), h("th", { scope: "col" }, "difference"))),
    h("tbody", {}, rows.map((r) => h("tr", {}, h("th", { scope: "row" }, r.name), h("td", { class: "track" }, track(r)),
      h("td", { class: "ours" }, measured(r)), h("td", { class: "paper" }, fixed(r.paper)), h("td", {}, difference(r))))),
    h("tfoot", { "aria-hidden": "true" }, h("tr", {}, h("td"), h("td", { class: "track" }, labels), h("td", { colspan: 3 }))));
}

// -------------------------------------------------------------------------------------------------- confusion matrices

/** The counts of a matrix from page.py's `packed`: zeros to skip and a count, again and again, in groups of 7 bits. */
function unpacked({ size, cells }) {
  const bytes = atob(cells);
  const counts = new Uint32Array(size * size);
  let next = 0;
  const number = () => {
    let value = 0;
    for (let unit = 1; ; unit *= 128) {
      const byte = bytes.charCodeAt(next++);
      value += (byte & 127) * unit;
      if (byte < 128) return value;
    }
  };
  for (let cell = 0; next < bytes.length; cell++) {
    cell += number();
    counts[cell] = number();
  }
  return counts;
}

/** sRGB of a lightness, chroma and hue of OKLab (Ottosson, 2020), in which equal steps look equally large. */
function oklch(lightness, chroma, hue) {
  const [a, b] = [chroma * Math.cos((hue * Math.PI) / 180), chroma * Math.sin((hue * Math.PI) / 180)];
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const n = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * n,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * n,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * n,
  ];
  return linear.map((v) => {
    const encoded = v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.max(0, Math.min(1, encoded)));
  });
}

/** The colour of a share in [0, 1]: nothing is like the page, much stands out, and lightness goes evenly between. */
function heat(share) {
  const chroma = 0.015 + 0.125 * Math.sin(Math.PI * Math.min(1, share * 1.02)) ** 0.8;
  return isDark() ? oklch(0.23 + 0.71 * share, chroma, 285 + 165 * share) : oklch(0.975 - 0.68 * share, chroma, 95 + 185 * share);
}

/** What the colours mean, in counts. */
function colourBar(most) {
  const bar = h("span", { class: "bar" });
  const paint = () => {
    const stops = Array.from({ length: 17 }, (_, i) => `rgb(${heat(i / 16).join(" ")})`);
    bar.style.background = `linear-gradient(to right, ${stops.join(",")})`;
  };
  paints.add(paint);
  paint();
  const marks = [0, 1, 3, 10, 30, 100, 300, 1000].filter((v) => v < most * 0.8 || v === 0);
  const labels = [...marks, most].map((v) =>
    h("span", { style: `left: ${(100 * Math.log1p(v)) / Math.log1p(most)}%` }, String(v)));
  return h("div", { class: "scale" }, h("span", {}, "images"), h("div", {}, bar, h("div", { class: "ends" }, labels)));
}

/** Cells of whole pixels of the screen, and the border between the first classes and later ones. */
function paintMatrix(canvas, { counts, size, base, most }, width) {
  const ratio = devicePixelRatio || 1;
  const cell = Math.max(1, Math.floor((width * ratio) / size));
  const side = Math.min(width, (cell * size) / ratio);
  canvas.closest(".matrix").style.setProperty("--side", `${side}px`);
  canvas.width = canvas.height = cell * size;
  const context = canvas.getContext("2d");
  context.fillStyle = `rgb(${heat(0).join(" ")})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  counts.forEach((count, i) => {
    if (!count) return;
    context.fillStyle = `rgb(${heat(Math.log1p(count) / Math.log1p(most)).join(" ")})`;
    context.fillRect((i % size) * cell, Math.floor(i / size) * cell, cell, cell);
  });
  if (base === size) return;
  context.fillStyle = getComputedStyle(canvas).color;
  context.fillRect(base * cell, 0, 1, canvas.height);
  context.fillRect(0, base * cell, canvas.width, 1);
}

/** A run's matrix with what stands around it. */
function matrixOf(run) {
  const size = run.confusion.size;
  const base = Math.min(run.base_classes || size, size);
  const counts = unpacked(run.confusion);
  const images = Array.from({ length: size }, (_, i) => counts.slice(i * size, (i + 1) * size).reduce((a, b) => a + b));
  const most = Math.max(1, ...images); // of images that all go to one class: the same for every run of a data set
  const canvas = h("canvas", { role: "img", "aria-label": `Confusion matrix of ${run.title}; arrow keys read its cells` });
  const field = h("div", { class: "field" }, canvas);
  const parts = () => [h("span", { style: `flex: ${base}` }, `first ${base}`),
    base < size && h("span", { style: `flex: ${size - base}` }, `later ${size - base}`)];
  const matrix = h("div", { class: "matrix" }, h("div", { class: "rows" }, parts()), field,
    h("div", { class: "columns" }, parts()), h("div", { class: "side" }, "true class"), h("div", { class: "below" }, "predicted class"));
  const box = h("div", { class: "matrix-box" }, matrix, colourBar(most));
  let width = 0;
  const paint = () => width && paintMatrix(canvas, { counts, size, base, most }, width);
  paints.add(paint);
  whenSized(box, (now) => ((width = Math.min(now - 46, 440)), paint()));
  showingCells(canvas, field, (row, column) => {
    const name = (i) => h("b", {}, run.class_order?.[i] ?? i);
    return [h("p", {}, "true class ", name(row), ", predicted class ", name(column)),
      h("p", {}, h("b", {}, counts[row * size + column]), ` of ${counted(images[row], "image")}`),
      h("p", { class: "quiet" }, `learned as number ${row + 1} and number ${column + 1}`)];
  }, size);
  return box;
}

/** Values of the cell under the pointer, or of one that the arrow keys move; a frame says which it is. */
function showingCells(canvas, field, words, size) {
  const frame = h("span", { class: "frame", hidden: "" });
  const within = (i) => Math.max(0, Math.min(size - 1, i));
  const cell = () => canvas.getBoundingClientRect().width / size;
  let [row, column] = [0, -1];
  const show = (clientX, clientY) => {
    const [left, top, side] = [column * cell(), row * cell(), cell()].map((v) => `${v}px`);
    Object.assign(frame.style, { left, top, width: side, height: side });
    frame.hidden = false;
    showTooltip(clientX, clientY, ...words(row, column));
  };
  field.append(frame);
  explore(canvas, {
    at: (x, y, clientX, clientY) => {
      [row, column] = [within(Math.floor(y / cell())), within(Math.floor(x / cell()))];
      show(clientX, clientY);
    },
    move: (dx, dy, left, top) => {
      [row, column] = [within(row + dy), within(column + dx)];
      show(left + (column + 1) * cell(), top + row * cell());
    },
    leave: () => (frame.hidden = true),
  });
}

const waiting = new Map(); // places of matrices that are not drawn yet, as nobody has seen them
const comingIntoView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) arrive(target);
}, { rootMargin: "300px" });

function arrive(place) {
  comingIntoView.unobserve(place);
  place.replaceWith(waiting.get(place)());
  waiting.delete(place);
}

/** A run's matrix, drawn when it comes into view. */
function matrixInTime(run) {
  if (!run?.confusion) return h("p", { class: "nothing" }, "No confusion matrix in the records.");
  const place = h("div", { class: "awaited" });
  waiting.set(place, () => matrixOf(run));
  comingIntoView.observe(place);
  return place;
}

// ------------------------------------------------------------------------------------------------------------- tables

/** Let headers sort the rows of each body: first one way, then the other, then as given. Nothing known comes last. */
function sortable(headers, bodies) {
  let [by, way] = [-1, 0];
  const compare = (one, other) => {
    const [a, b] = [one.keys[by], other.keys[by]];
    if (a.rank !== b.rank || a.rank === 2) return a.rank - b.rank;
    return way * (typeof a.key === "number" ? a.key - b.key : String(a.key).localeCompare(String(b.key), "en", { numeric: true }));
  };
  headers.forEach((header, column) => header.querySelector("button").addEventListener("click", () => {
    const first = bodies.some(({ rows }) => rows.some((row) => typeof row.keys[column].key === "number")) ? -1 : 1;
    way = by !== column ? first : way === first ? -first : 0; // the best number first, names from A
    by = column;
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    if (way) header.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    for (const { body, rows } of bodies) {
      body.replaceChildren(...(way ? [...rows].sort(compare) : rows).map((row) => row.element));
    }
    if (!way) by = -1;
  }));
}

function sortHeader(title, attributes = {}) {
  return h("th", { scope: "col", ...attributes }, h("button", { type: "button" }, title));
}

/** A box in which a wide table scrolls by itself, also by the keyboard. */
function scrolling(label, table) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
}

/** What a cell is sorted by: ours before what only the paper has, so that the two are never mixed. */
function keyOf(cell) {
  if (!none(cell?.ours)) return { rank: 0, key: cell.ours };
  return none(cell?.paper) ? { rank: 2, key: null } : { rank: 1, key: cell.paper };
}

function deviation({ std }) {
  return none(std) ? null : h("span", { class: "std" }, ` ± ${fixed(std)}`);
}

/** The paper's number and ours in a cell, ours large; what is not measured stays quiet. */
function cellWords(cell) {
  const paper = none(cell.paper) ? null : h("span", { class: "paper" }, fixed(cell.paper));
  if (cell.state === "quoted") return [paper];
  if (none(cell.ours)) {
    const why = cell.state === "needs data" ? h("span", { class: "why" }, cell.why || "needs data") : "–";
    return cell.state === "none" ? [paper] : [h("span", { class: "ours quiet" }, why), h("span", { class: "under" }, paper)];
  }
  const mark = ["close", "near", "off"].includes(cell.state) && h("i", { class: "state", title: cell.state });
  const difference = h("span", { class: `difference ${cell.state}` }, mark, signed(cell.difference));
  return [h("span", { class: "ours" }, fixed(cell.ours), deviation(cell)), h("span", { class: "under" }, paper, difference)];
}

/** What a click on a cell tells: the numbers in words, the command that measures it, and the runs it comes from. */
function cellDetail(row, column, cell) {
  const where = [row.name, column.group, column.title].filter(Boolean).join(", ");
  const numbers = [none(cell.ours) ? "not measured" : `measured ${fixed(cell.ours)}` + (none(cell.std) ? "" : ` ± ${fixed(cell.std)}`) +
    ` (${counted(cell.seeds, "seed")})`, !none(cell.paper) && `paper ${fixed(cell.paper)}`,
    !none(cell.difference) && `difference ${signed(cell.difference)}${cell.state ? `, ${cell.state}` : ""}`, none(cell.ours) && cell.why];
  const links = (cell.runs || []).map((id) => h("li", {}, runLink(id)));
  return h("div", { class: "detail" }, h("p", {}, h("b", {}, where), ": ", numbers.filter(Boolean).join("; ")),
    commandBox(cell.command), links.length > 0 && [h("p", {}, links.length > 1 ? "From these runs:" : "From this run:"), h("ul", {}, links)]);
}

/** A table of the paper; quoted rows have a body of their own and are sorted among themselves. */
function paperTable(table) {
  const columns = table.columns || [];
  const headers = [sortHeader("method"), ...columns.map((c) => sortHeader(c.title))];
  const groups = columns.reduce((all, { group }) => {
    if (all.length && all[all.length - 1].group === group) all[all.length - 1].span += 1;
    else all.push({ group, span: 1 });
    return all;
  }, []);
  const detail = h("tr", { class: "detail-row" });
  let open = null;
  const close = () => {
    open?.setAttribute("aria-expanded", "false");
    open = null;
    detail.remove();
  };
  const cellOf = (row, column) => {
    const cell = (row.cells || []).find((c) => c.column === column.id);
    if (!cell) return h("td");
    if (!cell.command && !cell.runs?.length) return h("td", { class: cell.state }, h("div", { class: "cell" }, cellWords(cell)));
    const toggle = () => {
      const again = open === button;
      close();
      if (again) return;
      open = button;
      button.setAttribute("aria-expanded", "true");
      detail.replaceChildren(h("td", { colspan: columns.length + 1 }, cellDetail(row, column, cell)));
      button.closest("tr").after(detail);
    };
    const button = h("button", { type: "button", class: "cell", "aria-expanded": "false", onclick: toggle }, cellWords(cell));
    return h("td", { class: cell.state }, button);
  };
  const bodyOf = (quoted) => ({
    body: h("tbody", { class: quoted ? "quoted" : "measured" }),
    rows: (table.rows || []).filter((row) => Boolean(row.quoted) === quoted).map((row) => ({
      element: h("tr", {}, h("th", { scope: "row" }, row.name, quoted && h("span", { class: "tag" }, "quoted")), columns.map((c) => cellOf(row, c))),
      keys: [{ rank: 0, key: row.name }, ...columns.map((c) => keyOf((row.cells || []).find((cell) => cell.column === c.id)))],
    })),
  });
  const bodies = [bodyOf(false), bodyOf(true)].filter(({ rows }) => rows.length);
  for (const { body, rows } of bodies) body.append(...rows.map(({ element }) => element));
  const head = h("thead", { onclick: close }, groups.some(({ group }) => group) && h("tr", { class: "groups" }, h("td"),
    groups.map(({ group, span }) => h("th", { colspan: span, scope: "colgroup" }, h("span", {}, group)))), h("tr", {}, headers));
  sortable(headers, bodies);
  return h("section", { id: `table-${table.id}`, class: "table" }, h("h3", {}, table.title),
    h("p", { class: "caption" }, table.caption, table.metric && h("span", { class: "metric" }, ` ${capital(table.metric)}.`)),
    scrolling(table.title, h("table", { class: "paper" }, head, bodies.map(({ body }) => body))));
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A table of strings; columns that hold numbers are aligned and sorted as such. */
function plainTable(label, columns, rows) {
  const number = (text) => (/^[−+-]?[\d,.]+$/.test(String(text)) ? Number(String(text).replaceAll(",", "").replace("−", "-")) : NaN);
  const numeric = columns.map((_, i) => i > 0 && rows.some((row) => !Number.isNaN(number(row[i]))));
  const headers = columns.map((title, i) => sortHeader(title || "name", { class: numeric[i] && "number" }));
  const keyed = rows.map((row) => ({
    element: h("tr", {}, columns.map((_, i) => i ? h("td", { class: numeric[i] && "number" }, row[i] ?? "–") : h("th", { scope: "row" }, row[0]))),
    keys: columns.map((_, i) => {
      const key = numeric[i] ? number(row[i]) : row[i];
      return { rank: none(key) || Number.isNaN(key) ? 2 : 0, key };
    }),
  }));
  const body = h("tbody", {}, keyed.map(({ element }) => element));
  sortable(headers, [{ body, rows: keyed }]);
  return scrolling(label, h("table", { class: "plain" }, h("thead", {}, h("tr", {}, headers)), body));
}

// --------------------------------------------------------------------------------------------------------------- runs

function runLink(id) {
  const run = runById.get(id);
  if (!run) return h("span", {}, id);
  return h("a", { href: `#${encodeURIComponent(`run-${id}`)}`, onclick: () => reveal(`run-${id}`) }, run.title);
}

/** Open the run that an address or a link names, also when the filter hides it. */
function reveal(id) {
  const target = byId(id);
  if (!target?.matches("details")) return;
  if (target.hidden) {
    const box = /** @type {HTMLInputElement} */ (byId("filter"));
    box.value = "";
    box.dispatchEvent(new Event("input"));
  }
  /** @type {HTMLDetailsElement} */ (target).open = true;
  requestAnimationFrame(() => target.scrollIntoView());
}

/** All about a run; made when it is opened, as a page may hold a hundred. */
function runBody(run) {
  const steps = run.steps || [];
  const columns = [["step", "step", 0], ["classes", "classes", 0], ["top1", "all", 2], ["top5", "top 5", 2], ["base", "base", 2],
    ["new", "new", 2], ["latest", "latest", 2], ["alpha", "α", 3], ["seconds", "seconds", 1]].filter(([key]) => key !== "alpha" || steps.some((step) => !none(step.alpha)));
  const curve = (name, key, group) => ({ name, group, x: steps.map((step) => step.classes), y: steps.map((step) => step[key]), spread: null, dashed: false });
  const figure = { title: run.title, x: { label: "classes learned", scale: "linear", ticks: steps.length < 13 ? steps.map((step) => step.classes) : null },
    y: { label: "accuracy, %" }, series: [curve("all classes", "top1", 0), curve("base", "base", 1), curve("new", "new", 2), curve("latest", "latest", 3)] };
  const facts = { average: fixed(run.average), final: fixed(run.final), "final, base": fixed(run.base), "final, new": fixed(run.new) };
  const where = { hardware: run.hardware, versions: run.versions, seconds: none(run.seconds) ? null : fixed(run.seconds, 1), reused: run.reused, record: run.id };
  return [
    h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    run.command && [h("h4", {}, "Run it again"), commandBox(run.command)],
    h("div", { class: "pair" },
      h("div", {}, h("h4", {}, "Accuracy after each step"), lineChart(figure)),
      h("div", {}, h("h4", {}, "Confusion after the last step"), matrixInTime(run))),
    steps.length > 0 && [h("h4", {}, "Steps"), plainTable(`Steps of ${run.title}`, columns.map(([, title]) => title),
      steps.map((step) => columns.map(([key, , digits]) => fixed(step[key], digits))))],
    h("h4", {}, "Where it ran"), definitions(where), h("h4", {}, "Settings"), definitions(run.settings || {}),
  ];
}

function definitions(values) {
  const known = Object.entries(values).filter(([, value]) => !none(value) && value !== "");
  return h("dl", { class: "settings" }, known.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value)))));
}

function runEntry(run) {
  const numbers = [["average", run.average], ["final", run.final]].map(([name, value]) =>
    h("span", {}, h("small", {}, name), " ", h("span", { class: "value" }, fixed(value))));
  const body = h("div", { class: "run" });
  const entry = h("details", { id: `run-${run.id}` }, h("summary", {}, h("span", { class: "title" }, run.title), h("span", { class: "numbers" }, numbers)), body);
  entry.addEventListener("toggle", () => {
    if (/** @type {HTMLDetailsElement} */ (entry).open && !body.hasChildNodes()) body.append(...runBody(run).flat().filter(Boolean));
  });
  return entry;
}

/** The list of runs; every word in the box must stand somewhere in a run's title, command, settings or folder. */
function runList() {
  const entries = allRuns.map((run) => ({
    element: runEntry(run),
    text: [run.id, run.title, run.command, ...Object.entries(run.settings || {}).flat()].join(" ").toLowerCase(),
  }));
  const count = h("span", { class: "count", role: "status" });
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { element, text } of entries) element.hidden = !words.every((word) => text.includes(word));
    const left = entries.filter(({ element }) => !element.hidden).length;
    count.textContent = words.length ? `${left} of ${counted(entries.length, "run")}` : counted(entries.length, "run");
  };
  const box = h("input", { id: "filter", type: "search", placeholder: "Filter by words, such as lucir memory-20", autocomplete: "off",
    spellcheck: "false", "aria-label": "Filter the runs by words", oninput: filter });
  filter();
  return [h("div", { class: "filter" }, box, count), h("div", { class: "runs" }, entries.map(({ element }) => element))];
}

// --------------------------------------------------------------------------------------------------------------- page

function figureOf(figure) {
  const panels = () => h("div", { class: "panels" }, (figure.panels || []).map((panel) =>
    h("div", { class: "panel" }, h("h4", {}, runById.has(panel.run) ? h("a", { href: `#${encodeURIComponent(`run-${panel.run}`)}`,
      onclick: () => reveal(`run-${panel.run}`) }, panel.name) : panel.name), matrixInTime(runById.get(panel.run)))));
  return h("figure", { id: `figure-${figure.id}`, class: figure.kind }, h("h3", {}, figure.title),
    figure.kind === "confusion" ? panels() : lineChart(figure), h("figcaption", {}, figure.caption));
}

/** How to read a cell; what the marks mean comes with the data where it is known. */
function tableKey() {
  const states = data.states || {};
  const words = ["close", "near", "off"].map((state) =>
    h("span", { class: `difference ${state}` }, h("i", { class: "state" }), states[state] ? `${state}: ${states[state]}` : state));
  return h("p", { class: "key" }, "Large: measured here. Below: the paper’s number and the difference to it. ", words,
    " A cell tells its command and its runs; a header sorts.");
}

function section(id, title, ...children) {
  return { id, title, element: h("section", { id }, h("h2", {}, title), ...children) };
}

function madeOf({ equipoise, runs, hardware, torch }) {
  return [`Equipoise ${equipoise}`, counted(runs, "run"), (hardware || []).join(", "), torch?.length && `torch ${torch.join(", ")}`]
    .filter(Boolean).join(" · ");
}

function build() {
  const some = (list) => list && list.length > 0;
  const sections = [
    some(data.headline) && section("glance", "At a glance", headlineChart(data.headline)),
    some(data.tables) && section("tables", "Tables", tableKey(), data.tables.map(paperTable)),
    some(data.figures) && section("figures", "Figures", h("div", { class: "figures" }, data.figures.map(figureOf))),
    data.costs && section("costs", "Cost", h("section", { class: "table" }, h("h3", {}, data.costs.title), h("p", { class: "caption" }, data.costs.caption),
      plainTable(data.costs.title, data.costs.columns || [], data.costs.rows || []))),
    section("runs", "Runs", some(allRuns) ? runList() : h("p", { class: "nothing" }, "No runs yet.")),
  ].filter(Boolean);
  byId("sections").append(...sections.map(({ id, title }) => h("a", { href: `#${id}` }, title)));
  byId("main").append(...sections.map(({ element }) => element));
  if (data.made) byId("made").textContent = madeOf(data.made);
}

build();
themeChanged();
byId("theme").addEventListener("click", toggleTheme);
prefersDark.addEventListener("change", themeChanged);
addEventListener("beforeprint", forPrint);
addEventListener("hashchange", () => reveal(decodeURIComponent(location.hash.slice(1))));
addEventListener("scroll", hideTooltip, { passive: true, capture: true });
document.addEventListener("pointerdown", (event) => {
  if (!(event.target instanceof Element && event.target.closest("canvas, svg.lines"))) hideTooltip();
});
if (location.hash) reveal(decodeURIComponent(location.hash.slice(1)));
