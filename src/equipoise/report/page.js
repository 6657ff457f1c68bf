// @ts-check
// Builds the page from the JSON that stands in it, with what charts.js draws.

const data = JSON.parse(byId("data").textContent);
const allRuns = data.runs || [];
const runById = new Map(allRuns.map((run) => [run.id, run]));

// ----------------------------------------------------------------------------------------------------------- commands

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

/** A command to run again, with a button that copies it. It is broken between words, never within `--flag`. */
function commandBox(command) {
  if (!command) return null;
  const code = h("code", {}, command.split(/( +)/).map((word) => (word.trim() ? h("span", {}, word) : word)));
  const button = h("button", { type: "button", class: "copy", "aria-live": "polite" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(command, code)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2500);
  });
  return h("div", { class: "command" }, code, button);
}

// ------------------------------------------------------------------------------------------------------------- tables

/** Let headers sort the rows of each body: first one way, then the other, then as given. What is unknown comes last. */
function sortable(headers, bodies) {
  let [by, way] = [-1, 0];
  const compare = (one, other) => {
    const [a, b] = [one.keys[by], other.keys[by]];
    if (a.rank !== b.rank || a.rank === UNKNOWN) return a.rank - b.rank;
    if (typeof a.key === "number") return way * (a.key - b.key);
    return way * String(a.key).localeCompare(String(b.key), "en", { numeric: true });
  };
  headers.forEach((header, column) => header.querySelector("button").addEventListener("click", () => {
    const numbers = bodies.some(({ rows }) => rows.some(({ keys }) => typeof keys[column].key === "number"));
    const first = numbers ? -1 : 1; // the largest number first, names from A
    way = by !== column || !way ? first : way === first ? -first : 0;
    by = column;
    for (const other of headers) other.removeAttribute("aria-sort");
    if (way) header.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    for (const { body, rows } of bodies) {
      body.replaceChildren(...(way ? [...rows].sort(compare) : rows).map((row) => row.element));
    }
  }));
}

const UNKNOWN = 2;

/** What a cell is sorted by: ours before what only the paper has, so that the two are never mixed. */
function keyOf(cell) {
  if (!none(cell?.ours)) return { rank: 0, key: cell.ours };
  return none(cell?.paper) ? { rank: UNKNOWN, key: null } : { rank: 1, key: cell.paper };
}

function sortHeader(title, attributes = {}) {
  return h("th", { scope: "col", ...attributes }, h("button", { type: "button" }, title));
}

/** A box in which a wide table scrolls by itself, by the keyboard too. */
function scrolling(label, table) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
}

/** The paper's number and ours in a cell, ours large; what is not measured stays quiet. */
function cellWords(cell) {
  const paper = !none(cell.paper) && h("span", { class: "paper" }, fixed(cell.paper));
  if (none(cell.ours) && ["quoted", "none"].includes(cell.state)) return [paper];
  if (none(cell.ours)) {
    const needs = (cell.why || "needs data").replaceAll("-", "\u2011"); // a data set's name stays on one line
    const why = cell.state === "needs data" ? h("span", { class: "why" }, needs) : "–";
    return [h("span", { class: "ours quiet" }, why), h("span", { class: "under" }, paper)];
  }
  const apart = !none(cell.difference) && difference(cell.difference, cell.state);
  const ours = h("span", { class: "ours" }, fixed(cell.ours), deviation(cell));
  return [ours, h("span", { class: "under" }, paper, " ", apart, cell.why && "ʲ")];
}

/** The numbers of a cell in words, for those who cannot see which is which. */
function cellSentence(cell) {
  const ours = fixed(cell.ours) + (none(cell.std) ? "" : ` ± ${fixed(cell.std)}`);
  return [
    none(cell.ours) ? cell.why || "not measured" : `measured ${ours} (${counted(cell.seeds, "seed")})`,
    !none(cell.paper) && `paper ${fixed(cell.paper)}`,
    !none(cell.difference) && `difference ${signed(cell.difference)}, ${cell.state}`,
    !none(cell.ours) && cell.why,
  ].filter(Boolean).join("; ");
}

/** What a click on a cell tells: its numbers in words, the command that measures it, and the runs it comes from. */
function cellDetail(row, column, cell) {
  const where = [row.name, column.group, column.title].filter(Boolean).join(", ");
  const links = (cell.runs || []).map((id) => h("li", {}, runLink(id, runById.get(id)?.title ?? id)));
  return h("div", { class: "detail" },
    h("p", {}, h("b", {}, where), ": ", cellSentence(cell)),
    commandBox(cell.command),
    links.length > 0 && [h("p", {}, links.length > 1 ? "From these runs:" : "From this run:"), h("ul", {}, links)]);
}

/** What opens below the row of a cell, one at a time, and closes when the cell is clicked again. */
function detailRow(span) {
  const row = h("tr", { class: "detail-row" });
  let open = null;
  const close = () => {
    open?.setAttribute("aria-expanded", "false");
    open = null;
    row.remove();
  };
  const toggle = (button, content) => {
    const again = open === button;
    close();
    if (again) return;
    open = button;
    open.setAttribute("aria-expanded", "true");
    row.replaceChildren(h("td", { colspan: span }, content()));
    button.closest("tr").after(row);
  };
  return { close, toggle };
}

/** Neighbouring columns of one group share a heading. */
function groupHeaders(columns) {
  const groups = [];
  for (const { group } of columns) {
    if (groups.length && groups[groups.length - 1].group === group) groups[groups.length - 1].span += 1;
    else groups.push({ group, span: 1 });
  }
  if (!groups.some(({ group }) => group)) return null;
  return h("tr", { class: "groups" }, h("td"), groups.map(({ group, span }) =>
    h("th", { colspan: span, scope: "colgroup" }, group && h("span", {}, group))));
}

/** A table of the paper; quoted rows have a body of their own and are sorted among themselves. */
function paperTable(table) {
  const columns = table.columns || [];
  const headers = [sortHeader(table.names || "method"), ...columns.map((column) => sortHeader(column.title))];
  const detail = detailRow(columns.length + 1);
  const find = (row, column) => (row.cells || []).find((cell) => cell.column === column.id);
  const cellOf = (row, column) => {
    const cell = find(row, column);
    if (!cell) return h("td");
    const tells = cell.command || cell.runs?.length;
    if (!tells) return h("td", {}, h("div", { class: "cell" }, cellWords(cell)));
    const onclick = () => detail.toggle(button, () => cellDetail(row, column, cell));
    const attributes = { type: "button", class: "cell", "aria-expanded": "false", "aria-label": cellSentence(cell) };
    const button = h("button", { ...attributes, onclick }, cellWords(cell));
    return h("td", {}, button);
  };
  const rowOf = (row) => ({
    element: h("tr", {},
      h("th", { scope: "row" }, row.name, row.quoted && [" ", h("span", { class: "tag" }, "quoted")]),
      columns.map((column) => cellOf(row, column))),
    keys: [{ rank: 0, key: row.name }, ...columns.map((column) => keyOf(find(row, column)))],
  });
  const bodies = [false, true].map((quoted) => {
    const rows = (table.rows || []).filter((row) => Boolean(row.quoted) === quoted).map(rowOf);
    return { body: h("tbody", { class: quoted ? "quoted" : "measured" }, rows.map(({ element }) => element)), rows };
  }).filter(({ rows }) => rows.length);
  sortable(headers, bodies);
  const head = h("thead", { onclick: detail.close }, groupHeaders(columns), h("tr", {}, headers));
  const metric = table.metric && ` ${table.metric.charAt(0).toUpperCase()}${table.metric.slice(1)}.`;
  return h("section", { id: `table-${table.id}`, class: "table" }, h("h3", {}, table.title),
    h("p", { class: "caption" }, table.caption, metric),
    scrolling(table.title, h("table", { class: "paper" }, head, bodies.map(({ body }) => body))));
}

/** A table of strings; columns of numbers are aligned and sorted as such. */
function plainTable(label, columns, rows) {
  const number = (text) => /^[−+-]?[\d,.]+$/.test(text) ? Number(text.replaceAll(",", "").replace("−", "-")) : NaN;
  const numeric = columns.map((_, i) => i > 0 && rows.some((row) => !Number.isNaN(number(String(row[i])))));
  const headers = columns.map((title, i) => sortHeader(title || "name", { class: numeric[i] && "number" }));
  const keyed = rows.map((row) => ({
    element: h("tr", {}, columns.map((_, i) => i === 0
      ? h("th", { scope: "row" }, row[i]) : h("td", { class: numeric[i] && "number" }, row[i]))),
    keys: columns.map((_, i) => {
      const key = numeric[i] ? number(String(row[i])) : row[i];
      return { rank: none(key) || Number.isNaN(key) ? UNKNOWN : 0, key };
    }),
  }));
  const body = h("tbody", {}, keyed.map(({ element }) => element));
  sortable(headers, [{ body, rows: keyed }]);
  return scrolling(label, h("table", { class: "plain" }, h("thead", {}, h("tr", {}, headers)), body));
}

/** How to read a cell; what the marks mean comes with the data. */
function tableKey() {
  const said = (state) => [state, data.states?.[state]].filter(Boolean).join(": ");
  const marks = Object.keys(data.states || { close: "", near: "", off: "" }).map((state) =>
    h("li", { class: `difference ${state}` }, h("i", { class: "state" }), said(state)));
  const links = data.tables.map(({ id, title }) =>
    h("li", {}, h("a", { href: `#${encodeURIComponent(`table-${id}`)}` }, title)));
  return [
    h("p", { class: "key" }, "In a cell, large: measured here; below it, the paper’s number and the difference. ",
      "Click a cell for its command and its runs, a header to sort."),
    h("ul", { class: "key" }, marks),
    links.length > 2 && h("ul", { class: "key jump" }, links)];
}

// --------------------------------------------------------------------------------------------------------------- runs

function runLink(id, words) {
  if (!runById.has(id)) return h("span", {}, words);
  return h("a", { href: `#${encodeURIComponent(`run-${id}`)}`, onclick: () => reveal(`run-${id}`) }, words);
}

/** Open the run that an address or a link names, also when the filter hides it. */
function reveal(id) {
  const entry = byId(id);
  if (!(entry instanceof HTMLDetailsElement)) return;
  if (entry.hidden) byId("filter").dispatchEvent(new Event("clear"));
  entry.open = true;
  requestAnimationFrame(() => entry.scrollIntoView());
}

function stepsChart(run, steps) {
  const x = steps.map((step) => step.classes);
  const curve = ([name, key], group) => ({ name, group, x, y: steps.map((step) => step[key]) });
  return lineChart({
    title: run.title,
    x: { label: "classes learned", scale: "linear", ticks: x },
    y: { label: "accuracy, %" },
    series: [["all classes", "top1"], ["base", "base"], ["new", "new"], ["latest", "latest"]].map(curve),
  });
}

function stepsTable(run, steps) {
  const columns = [["step", "step", 0], ["classes", "classes", 0], ["all", "top1", 2], ["top 5", "top5", 2],
    ["base", "base", 2], ["new", "new", 2], ["latest", "latest", 2], ["α", "alpha", 3], ["seconds", "seconds", 1]];
  const used = columns.filter(([, key]) => key !== "alpha" || steps.some((step) => !none(step.alpha)));
  const rows = steps.map((step) => used.map(([, key, digits]) => fixed(step[key], Number(digits))));
  return plainTable(`Steps of ${run.title}`, used.map(([title]) => title), rows);
}

/** Names and values side by side; what is not known is left out. */
function definitions(kind, values) {
  const known = Object.entries(values).filter(([, value]) => !none(value) && value !== "");
  return h("dl", { class: kind }, known.map(([name, value]) =>
    h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value)))));
}

/** All about a run; made when it is opened, as a page may hold a hundred. */
function runBody(run) {
  const steps = run.steps || [];
  const seconds = none(run.seconds) ? null : fixed(run.seconds, 1);
  return h("div", { class: "run" },
    definitions("facts", { average: fixed(run.average), final: fixed(run.final), "final, base classes": fixed(run.base),
      "final, new classes": fixed(run.new) }),
    run.command && [h("h4", {}, "Run it again"), commandBox(run.command)],
    h("div", { class: "pair" },
      h("div", {}, h("h4", {}, "Accuracy after each step"), stepsChart(run, steps)),
      h("div", {}, h("h4", {}, "Confusion after the last step"), matrixInTime(run))),
    steps.length > 0 && [h("h4", {}, "Steps"), stepsTable(run, steps)],
    h("h4", {}, "Where it ran"),
    definitions("where", {
      hardware: run.hardware, versions: run.versions, seconds, reused: run.reused, record: run.id }),
    h("h4", {}, "Settings"), definitions("settings", run.settings || {}));
}

function runEntry(run) {
  const number = (name, value) => h("span", {}, h("small", {}, name), " ", fixed(value));
  const entry = h("details", { id: `run-${run.id}` }, h("summary", {}, h("span", { class: "title" }, run.title),
    h("span", { class: "numbers" }, number("average", run.average), number("final", run.final))));
  entry.addEventListener("toggle", () => entry.append(runBody(run)), { once: true });
  return entry;
}

/** The list of runs; every word in the box must stand somewhere in a run's title, command, settings or folder. */
function runList() {
  const entries = allRuns.map((run) => {
    const text = [run.id, run.title, run.command, ...Object.entries(run.settings || {}).flat()].join(" ");
    return { element: runEntry(run), text: text.toLowerCase() };
  });
  const count = h("span", { class: "count", role: "status" });
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { element, text } of entries) element.hidden = !words.every((word) => text.includes(word));
    const left = entries.filter(({ element }) => !element.hidden).length;
    count.textContent = (words.length ? `${left} of ` : "") + counted(entries.length, "run");
  };
  const clear = () => ((box.value = ""), filter());
  const box = h("input", { id: "filter", type: "search", placeholder: "Filter by words", autocomplete: "off",
    spellcheck: "false", "aria-label": "Filter the runs by words", oninput: filter, onclear: clear });
  filter();
  return [h("div", { class: "filter" }, box, count),
    h("div", { class: "runs" }, entries.map(({ element }) => element))];
}

// --------------------------------------------------------------------------------------------------------------- page

function figureOf(figure) {
  const panels = (figure.panels || []).map((panel) => h("div", { class: "panel" },
    h("h4", {}, runLink(panel.run, panel.name)), matrixInTime(runById.get(panel.run))));
  return h("figure", { id: `figure-${figure.id}`, class: figure.kind }, h("h3", {}, figure.title),
    figure.kind === "confusion" ? h("div", { class: "panels" }, panels) : lineChart(figure),
    h("figcaption", {}, figure.caption));
}

function costsOf({ title, caption, columns, rows }) {
  return h("section", { class: "table" }, h("h3", {}, title), h("p", { class: "caption" }, caption),
    plainTable(title, columns || [], rows || []));
}

function madeOf({ equipoise, runs, hardware, torch }) {
  const parts = [`Equipoise ${equipoise}`, counted(runs, "run"), hardware?.join(", ")];
  return [...parts, torch?.length && `torch ${torch.join(", ")}`].filter(Boolean).join(" · ");
}

/** What the data has, section by section, and a link to each at the top. */
function build() {
  const section = (id, title, ...children) =>
    ({ id, title, element: h("section", { id }, h("h2", {}, title), children) });
  const sections = [
    data.headline?.length && section("glance", "At a glance",
      data.headline_caption && h("p", { class: "caption" }, data.headline_caption), headlineChart(data.headline)),
    data.tables?.length && section("tables", "Tables", tableKey(), data.tables.map(paperTable)),
    data.figures?.length && section("figures", "Figures", h("div", { class: "figures" }, data.figures.map(figureOf))),
    data.costs && section("costs", "Cost", costsOf(data.costs)),
    section("runs", "Runs", allRuns.length ? runList() : h("p", { class: "nothing" }, "No runs yet.")),
  ].filter(Boolean);
  byId("sections").append(...sections.map(({ id, title }) => h("a", { href: `#${id}` }, title)));
  byId("main").append(...sections.map(({ element }) => element));
  if (data.made) byId("made").textContent = madeOf(data.made);
}

const revealAddress = () => location.hash && reveal(decodeURIComponent(location.hash.slice(1)));
build();
themeChanged();
revealAddress();
byId("theme").addEventListener("click", toggleTheme);
prefersDark.addEventListener("change", themeChanged);
addEventListener("beforeprint", forPrint);
addEventListener("hashchange", revealAddress);
addEventListener("scroll", hideTooltip, { passive: true, capture: true });
addEventListener("pointerdown", ({ target }) => {
  if (!(target instanceof Element && target.closest("canvas, svg.lines"))) hideTooltip();
});
