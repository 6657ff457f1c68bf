// @ts-check
// What the page draws with: elements, theme, tooltip, line charts and confusion matrices. page.js comes after it in the
// same script. Nothing of the data is ever parsed as HTML: text goes in as text.
"use strict";

const COLOURS = 8; // how many --series-N the style sheet has
const root = document.documentElement;
const byId = (/** @type {string} */ id) => document.getElementById(id);
const tooltip = byId("tooltip");

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

/** A difference to the paper's number, with the mark of how far it is. */
function difference(value, state) {
  return h("span", { class: `difference ${state || ""}` }, state && h("i", { class: "state" }), signed(value));
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
    if (!width || width === last) return;
    last = width;
    requestAnimationFrame(() => draw(width)); // at once, the new height would be observed again: browsers complain
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

// ------------------------------------------------------------------------------------------------------------ tooltip

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

let explored = null; // whose values the tooltip shows

/** Show values where a pointer is or where the arrow keys move to; a finger that is lifted leaves them there. */
function explore(target, { at, move, leave }) {
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const gone = () => {
    leave();
    if (explored === target) hideTooltip(); // a tap elsewhere has shown its own before the focus leaves here
  };
  const pointed = (event) => {
    explored = target;
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
      explored = target;
      const { left, top } = target.getBoundingClientRect();
      move(...arrows[event.key], left, top);
    },
  });
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

/** Ticks of a horizontal axis within its values: those given if they are a dozen, else powers of ten or round numbers. */
function ticksOf(axis, low, high) {
  const given = axis.ticks ? axis.ticks.length : 0;
  if (given && given <= 12) return axis.ticks.filter((v) => v >= low && v <= high);
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
  const d = r * 1.3;
  const shapes = [
    () => s("circle", { cx: x, cy: y, r }),
    () => s("rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8 }),
    () => s("path", { d: `M${x},${y - r * 1.2}l${r * 1.15},${r * 2}h${-r * 2.3}z` }),
    () => s("path", { d: `M${x},${y - d}l${d},${d} ${-d},${d} ${-d},${-d}z` }),
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
  const reach = (side) => known.map((p) => p.y + side * p.spread);
  const yTicks = roundTicks(Math.min(...reach(-1)), Math.max(...reach(1)), 5);
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
  const viewBox = `0 0 ${width} ${height}`;
  const svg = s("svg", { class: "lines", width, height, viewBox, role: "img", "aria-label": label },
    axes(figure, box, height, yTicks.map((v) => ({ py: py(v), label: short(v) })),
      ticksOf(figure.x, low, high).map((v) => ({ px: px(v), label: short(v) }))),
    // What was measured lies above what it is compared with.
    [...shown].sort((a, b) => Number(b.series.dashed) - Number(a.series.dashed))
      .map(({ series, points }) => lineOf(series, points)));
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

/** Mean and deviation are told apart by weight. */
function deviation({ std }) {
  return none(std) ? null : h("span", { class: "std" }, ` ± ${fixed(std)}`);
}

/** The chart at the top: a ring for the paper, a dot for ours; where they agree the dot lies in the ring. */
function headlineChart(rows) {
  const ends = ({ ours, std, paper }) => [paper, ...(none(ours) ? [] : [ours - (std || 0), ours + (std || 0)])];
  const values = rows.flatMap(ends).filter((v) => !none(v));
  if (!values.length) return h("p", { class: "nothing" }, "Nothing measured yet.");
  const ticks = roundTicks(Math.min(...values), Math.max(...values), 5);
  const at = scaleOf({}, ticks[0], ticks[ticks.length - 1]);
  const x = (value) => `${(100 * at(value)).toFixed(3)}%`;
  const across = (name, from, to) => s("line", { class: name, x1: x(from), x2: x(to), y1: "50%", y2: "50%" });
  const track = ({ ours, std, paper }) => s("svg", { "aria-hidden": "true" },
    ticks.map((v) => s("line", { class: "grid", x1: x(v), x2: x(v), y1: 0, y2: "100%" })),
    !none(ours) && !none(paper) && across("link", paper, ours),
    !none(ours) && std && across("whisker", ours - std, ours + std),
    !none(paper) && s("circle", { class: "ring", cx: x(paper), cy: "50%", r: 6.5 }),
    !none(ours) && s("circle", { class: "dot", cx: x(ours), cy: "50%", r: 3.8 }));
  const line = (row) => h("tr", {}, h("th", { scope: "row" }, row.name), h("td", { class: "track" }, track(row)),
    h("td", { class: none(row.ours) ? "paper" : "ours" }, fixed(row.ours), deviation(row)),
    h("td", { class: "paper" }, fixed(row.paper)),
    h("td", { class: "paper" }, !none(row.ours) && !none(row.paper) && difference(row.ours - row.paper, row.state)));
  const circle = (name, r) => s("svg", { width: 16, height: 16, "aria-hidden": "true" },
    s("circle", { class: name, cx: 8, cy: 8, r }));
  const label = (v) => s("text", { class: "tick", x: x(v), y: 14, "text-anchor": "middle" }, short(v));
  return h("table", { class: "headline" },
    h("thead", {}, h("tr", {}, h("td"), h("td", { class: "track" }),
      h("th", { scope: "col" }, circle("dot", 3.8), "measured"),
      h("th", { scope: "col" }, circle("ring", 6.5), "paper"), h("th", { scope: "col" }, "difference"))),
    h("tbody", {}, rows.map(line)),
    h("tfoot", { "aria-hidden": "true" }, h("tr", {}, h("td"),
      h("td", { class: "track" }, s("svg", {}, ticks.map(label))), h("td", { colspan: 3 }))));
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
  const chroma = 0.008 + 0.132 * Math.sin(Math.PI * share) ** 0.8;
  if (isDark()) return oklch(0.23 + 0.71 * share, chroma, 285 + 165 * share);
  return oklch(0.975 - 0.68 * share, chroma, 95 + 185 * share);
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
  const most = Math.max(1, ...images); // the images of a class: the same for every run of a data set
  const spoken = `Confusion matrix of ${run.title}: arrow keys read its cells`;
  const canvas = h("canvas", { role: "img", "aria-label": spoken });
  const field = h("div", { class: "field" }, canvas);
  const part = (classes, word) => classes > 0 && h("span", { style: `flex: ${classes}` }, `${word} ${classes}`);
  const parts = () => [part(base, "first"), part(size - base, "later")];
  const box = h("div", { class: "matrix-box" },
    h("div", { class: "matrix" }, h("div", { class: "side" }, "true class"), h("div", { class: "rows" }, parts()),
      field, h("div", { class: "columns" }, parts()), h("div", { class: "below" }, "predicted class")),
    colourBar(most));
  const paint = () => { // as wide as there is room beside what stands at its left
    if (box.clientWidth) paintMatrix(canvas, { counts, size, base, most }, Math.min(box.clientWidth - 44, 440));
  };
  paints.add(paint);
  whenSized(box, paint);
  const name = (i) => h("b", {}, run.class_order?.[i] ?? i);
  showingCells(canvas, field, size, (row, column) => [
    h("p", {}, "true class ", name(row), ", predicted class ", name(column)),
    h("p", {}, h("b", {}, counts[row * size + column]), ` of ${counted(images[row], "image")}`),
    h("p", { class: "quiet" }, `learned as number ${row + 1} and number ${column + 1}`)]);
  return box;
}

/** Values of the cell under the pointer, or of one that the arrow keys move; a frame says which it is. */
function showingCells(canvas, field, size, words) {
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

