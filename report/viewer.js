// The list of readings on the page: filters, search, and the one that is open; each is a row.
// report/viewer.py packs the rows, report/viewer.html is the frame. Whatever a row says gets into
// the page as text, never as HTML.
"use strict";
(async () => {
  const part = (name) => document.getElementById(`rows-${name}`);
  const lines = part("lines"), space = part("space"), open = part("open");
  const search = part("search"), count = part("count");
  const filters = [...document.querySelectorAll("#rows [data-column]")];
  const LINE = 3.5 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  const MARGIN = 5; // lines that are drawn above and below those in sight
  const TOGETHER = +lines.dataset.together; // transcripts in a block

  // ---------------------------------------------------------------- blocks

  const blocks = new Map(); // name -> promise

  async function unpack(name) {
    const binary = atob(part(name).textContent), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  function load(name) {
    if (!blocks.has(name)) blocks.set(name, unpack(name));
    return blocks.get(name);
  }

  // node: [tag, class, ...children]; a child is a text or a node
  function build([tag, style, ...children]) {
    const element = document.createElement(tag);
    if (style) element.className = style;
    element.append(...children.map((child) => (Array.isArray(child) ? build(child) : child)));
    return element;
  }

  if (!window.DecompressionStream) {
    part("off").textContent = "This browser is too old to unpack the readings.";
    return;
  }
  document.getElementById("rows").hidden = false;
  part("off").remove();
  const list = await load("list"), total = list.result.at.length;
  const text = (name, row) => String(list[name].values[list[name].at[row]] ?? "");
  const style = (row) => `tag ${text("result", row) === "right" ? "good" : "bad"}`;

  // ---------------------------------------------------------------- the list

  let shown = []; // rows that the filters let through
  let current = -1; // place in `shown`
  const drawn = new Map(); // place -> its line

  function cell(row) {
    const length = (+text("length", row)).toLocaleString("en");
    return [
      text("agent", row), `${length} ${lines.dataset.unit}`,
      text("sampling", row), text("kind", row),
    ].join(", ");
  }

  function line(k) {
    const row = shown[k];
    const element = build([
      "div", "rows-line",
      ["span", style(row), text("result", row)], " ",
      ["small", "", cell(row)],
      ["div", "rows-said", text("question", row), " ", ["b", "", text("answer", row)]],
    ]);
    element.id = `rows-line-${k}`;
    element.style.top = `${k * LINE}px`;
    element.style.height = `${LINE}px`;
    element.role = "option";
    element.ariaSelected = k === current;
    element.addEventListener("click", () => { move(k); show(); });
    element.ariaPosInSet = k + 1;
    element.ariaSetSize = shown.length;
    return element;
  }

  // Lines that stay in sight are kept: a click needs the same element at its beginning and end.
  function draw() {
    const first = Math.max(0, Math.floor(lines.scrollTop / LINE) - MARGIN);
    const sight = Math.ceil((lines.scrollTop + lines.clientHeight) / LINE);
    const end = Math.min(sight + MARGIN, shown.length);
    for (const [k, element] of drawn) {
      if (k < first || k >= end) {
        element.remove();
        drawn.delete(k);
      } else element.ariaSelected = k === current;
    }
    for (let k = first; k < end; k++) {
      if (drawn.has(k)) continue;
      drawn.set(k, line(k));
      space.append(drawn.get(k));
    }
    space.style.height = `${shown.length * LINE}px`;
  }

  function move(to) {
    current = Math.max(0, Math.min(shown.length - 1, to));
    const top = current * LINE, bottom = top + LINE - lines.clientHeight;
    if (top < lines.scrollTop) lines.scrollTop = top;
    else if (bottom > lines.scrollTop) lines.scrollTop = bottom;
    draw();
    lines.setAttribute("aria-activedescendant", `rows-line-${current}`);
  }

  // ---------------------------------------------------------------- the row that is open

  let opened = 0; // calls of `show`: a slow one must not replace a later one

  async function show() {
    const mine = ++opened, row = shown[current], place = list.record.values[list.record.at[row]];
    const body = place === null ? await outline(row)
      : (await load(`transcripts-${Math.floor(place / TOGETHER)}`))[place % TOGETHER];
    if (mine !== opened) return;
    const head = [
      "div", "",
      ["h3", "", ["span", style(row), text("result", row)], ` ${text("origin", row)}`],
      ["small", "", cell(row)],
      ["p", "rows-question", text("question", row)],
    ];
    open.replaceChildren(build(head), build(body));
    open.scrollTop = 0;
    open.scrollIntoView({ block: "nearest" });
  }

  // what there is of a row whose transcript was not kept
  async function outline(row) {
    const memories = await load("memories"), { values, at } = memories.memory;
    const named = ["answer", "accepted", "error"].map((name) => [name, text(name, row)]);
    const memory = values[at[row]], facts = named.filter(([, said]) => said);
    return [
      "div", "",
      ...(memory ? [["p", "memory", ["b", "", "last memory"], " ", memory]] : []),
      ["dl", "", ...facts.flatMap(([name, said]) => [["dt", "", name], ["dd", "", said]])],
      ["p", "note", "Its sections were not kept; eval --transcripts N keeps those of more questions."],
    ];
  }

  // ---------------------------------------------------------------- filters and search

  let asked = 0; // calls of `apply`, likewise

  // for each column that is searched: its indices, and which of its values hold the words
  async function found(words) {
    const { memory } = await load("memories");
    return [list.question, list.answer, list.accepted, memory].map((column) => {
      column.lower ??= column.values.map((value) => value.toLowerCase());
      return [column.at, column.lower.map((value) => value.includes(words))];
    });
  }

  async function apply() {
    const mine = ++asked, words = search.value.trim().toLowerCase();
    const hits = words ? await found(words) : [];
    if (mine !== asked) return;
    const wanted = filters.filter((filter) => filter.value)
      .map((filter) => [list[filter.dataset.column].at, +filter.value]);
    shown = [];
    for (let row = 0; row < total; row++) {
      if (wanted.every(([at, value]) => at[row] === value)
        && (!words || hits.some(([at, holds]) => holds[at[row]]))) shown.push(row);
    }
    const right = shown.filter((row) => text("result", row) === "right").length;
    const [n, all, good] = [shown.length, total, right].map((x) => x.toLocaleString("en"));
    count.textContent = `${n} of ${all} readings, ${good} right`;
    current = -1;
    drawn.clear();
    space.replaceChildren();
    lines.removeAttribute("aria-activedescendant");
    lines.scrollTop = 0;
    draw();
  }

  for (const filter of filters) {
    const { values } = list[filter.dataset.column], order = values.map((_, k) => k);
    if (filter.dataset.column === "length") order.sort((a, b) => values[a] - values[b]);
    const options = order.map((k) => new Option(values[k].toLocaleString("en"), k));
    filter.append(new Option("all", ""), ...options);
    filter.closest("label").hidden = values.length < 2;
    filter.addEventListener("change", apply);
  }
  search.addEventListener("input", apply);
  lines.addEventListener("scroll", () => requestAnimationFrame(draw));
  window.addEventListener("resize", draw);
  lines.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(lines.clientHeight / LINE));
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    const step = { ...steps, Home: -total, End: total }[event.key];
    if (!shown.length || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    if (step) move(current + step);
    else if (current >= 0) show().then(() => open.focus());
  });
  open.addEventListener("keydown", (event) => { if (event.key === "Escape") lines.focus(); });
  await apply();
  document.getElementById("rows").dataset.ready = Math.round(performance.now()); // for the tests
})();
