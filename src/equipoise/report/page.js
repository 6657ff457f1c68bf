// @ts-check
// What a click does on the page: sort a table, copy a command, filter the runs, open one, change the theme.
"use strict";

const root = document.documentElement;
const byId = (/** @type {string} */ id) => document.getElementById(id);

// ------------------------------------------------------------------------------------------------------------- tables

const UNKNOWN = 2;

/** What a row is sorted by in a column; what has no rank is unknown. */
function keyOf(row, column, numbers) {
  const { rank = UNKNOWN, key = "" } = row.cells[column]?.dataset ?? {};
  return { rank: Number(rank), key: numbers ? Number(key) : key };
}

/** Let headers sort the rows of each body: first one way, then the other, then as given. What is unknown comes last. */
function sortable(table) {
  const headers = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const given = [...table.tBodies].map((body) => ({ body, rows: [...body.rows] }));
  let [by, way] = [-1, 0];
  headers.forEach((header, column) => header.querySelector("button").addEventListener("click", () => {
    const numbers = header.classList.contains("number");
    const first = numbers ? -1 : 1; // the largest number first, names from A
    way = by !== column || !way ? first : way === first ? -first : 0;
    by = column;
    const compare = (one, other) => {
      const [a, b] = [keyOf(one, column, numbers), keyOf(other, column, numbers)];
      if (a.rank !== b.rank || a.rank === UNKNOWN) return a.rank - b.rank;
      return way * (numbers ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true }));
    };
    for (const other of headers) other.removeAttribute("aria-sort");
    if (way) header.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    for (const { body, rows } of given) body.append(...(way ? [...rows].sort(compare) : rows));
  }));
}

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

async function copyCommand(button) {
  const code = button.previousElementSibling;
  button.textContent = (await copied(code.textContent, code)) ? "Copied" : "Press Ctrl+C";
  setTimeout(() => (button.textContent = "Copy"), 2500);
}

// --------------------------------------------------------------------------------------------------------------- runs

/** Show the runs in whose title, command, folder or settings every word of the box stands. */
function filterRuns() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const entries = [...document.querySelectorAll(".runs > details")];
  for (const entry of entries) {
    const parts = [...entry.querySelectorAll(".title, .command code, .where, .settings")];
    const text = parts.map((part) => part.textContent).join(" ").toLowerCase();
    entry.hidden = !words.every((word) => text.includes(word));
  }
  const left = entries.filter((entry) => !entry.hidden).length;
  const all = `${entries.length} run${entries.length === 1 ? "" : "s"}`;
  document.querySelector(".count").textContent = words.length ? `${left} of ${all}` : all;
}

/** Open the run that the address names, also when the filter hides it. */
function reveal() {
  const entry = byId(decodeURIComponent(location.hash.slice(1)));
  if (!(entry instanceof HTMLDetailsElement)) return;
  document.querySelector(".detail:popover-open")?.hidePopover();
  if (entry.hidden) {
    byId("filter").value = "";
    filterRuns();
  }
  entry.open = true;
  requestAnimationFrame(() => entry.scrollIntoView());
}

// -------------------------------------------------------------------------------------------------------------- theme

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
}

/** Write on the button what a click does. */
function nameTheme() {
  const words = `Use the ${isDark() ? "light" : "dark"} theme`;
  byId("theme").title = words;
  byId("theme").setAttribute("aria-label", words);
}

function toggleTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  try {
    localStorage.setItem("equipoise-theme", root.dataset.theme);
  } catch {
    // A browser that keeps nothing for file:// still shows the theme until the page is left.
  }
}

for (const table of document.querySelectorAll(".scroll > table")) sortable(table);
nameTheme();
reveal();
byId("theme").addEventListener("click", toggleTheme);
byId("filter")?.addEventListener("input", filterRuns);
prefersDark.addEventListener("change", nameTheme);
addEventListener("hashchange", reveal);
addEventListener("click", ({ target }) => {
  if (!(target instanceof Element)) return;
  if (target.matches(".copy")) copyCommand(target);
  // A link to the run that the address names already changes no address.
  if (target.closest("a")?.hash && target.closest("a").hash === location.hash) reveal();
});
