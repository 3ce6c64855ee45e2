"use strict";
// The page's own wiring: one state (search, region, brush, order), shown in chart, table and cards.
// Text goes in as text, never as markup.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const columns = new Map(data.columns.map((c) => [c.name, c]));
const n = data.columns[0].values.length;
const PAGE = 25;
// Okabe and Ito, and a shape for each: told apart by a colour-blind reader and in grey.
const LIGHT = ["#7F7F7F", "#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#B8A800"];
const DARK = ["#9A9A9A", "#3D9BE0", "#E69F00", "#F0742E", "#A6DCFF", "#2CC79B", "#E09CC4", "#E8DA3A"];
const MARKS = ["circle", "square", "triangle", "diamond", "inverted_triangle", "plus", "x", "star"];
const STEPS = ["#00224E", "#35456C", "#666970", "#948E77", "#C8B866", "#FEE838"]; // cividis
const SHAPES = {
  circle: "M7 2a5 5 0 1 0 .01 0z", square: "M2.5 2.5h9v9h-9z", triangle: "M7 2l5.5 10h-11z",
  diamond: "M7 1l4 6-4 6-4-6z", inverted_triangle: "M7 12L1.5 2h11z", plus: "M6 1h2v5h5v2H8v5H6V8H1V6h5z",
  x: "M2 3l1-1 4 4 4-4 1 1-4 4 4 4-1 1-4-4-4 4-1-1 4-4z", star: "M7 1l2 4h4l-3 3 1 5-4-3-4 3 1-5-3-3h4z",
};
const state = { words: "", where: {}, brush: null, by: "rank", down: false, page: 0 };
let listed = [];
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const night = () => dark.matches && !document.documentElement.classList.contains("printed");
let points = null, focus = null, shown = null, own = false;

const value = (name, k) => columns.get(name)?.values[k] ?? null;
const make = (tag, props = {}, ...inside) => {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...inside.filter((part) => part !== null));
  return element;
};
const tile = (k, side) => {
  if (data.across === null || k === null) return null;
  const element = make("span", { className: "tile" });
  const place = { "--side": side + "px", "--column": k % data.across, "--row": Math.floor(k / data.across) };
  for (const [name, v] of Object.entries(place)) element.style.setProperty(name, v);
  return element;
};
const words = (text, name = "words") => text ? make("p", { className: name, dir: "auto", textContent: text }) : null;
const said = (v) => v === null ? "" : typeof v === "boolean" ? (v ? "yes" : "no") : String(v);
const two = (v) => { // figures of the analyses to two digits
  if (typeof v !== "number" || v === 0) return said(v);
  return Math.abs(v) >= 1e7 || Math.abs(v) < 1e-4 ? v.toExponential(1)
    : v.toLocaleString("en", { maximumSignificantDigits: 2, useGrouping: true });
};
const MEASURED = new Set(["loss", "left_out_loss", "deviation", "leverage", "error", "variance", "self_influence", "loss_per_token", "variance_error"]);
const PREDICTED = new Set(["prediction", "left_out_prediction"]);
const predicted = (v) => Number.isInteger(v) ? said(v) // a class, or a number of which all digits before the point count
  : Math.abs(v) >= 100 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : two(v);
const shownAs = (name, v) => MEASURED.has(name) ? two(v) : PREDICTED.has(name) ? predicted(v) : said(v);
const title = (name) => name.replace(/^left_out_/, "left-out ").replaceAll("_", " ");
const meaning = (name) => data.words[title(name)] ?? "";
// A word that says what it means to whoever points at it, or moves to it.
// The keyboard stops at the first of each word alone.
const explained = new Set();
const word = (name) => {
  if (!meaning(name)) return title(name);
  const tabIndex = explained.has(name) ? -1 : 0;
  explained.add(name);
  return make("abbr", { title: meaning(name), tabIndex, textContent: title(name) });
};

const long = (v) => typeof v === "string" && v.length > 24 ? "long" : "";

// What is known of a row, as a card.
const known = (k, names) => {
  const list = make("dl");
  for (const name of names) {
    if (!columns.has(name) || value(name, k) === null) continue;
    list.append(make("dt", {}, word(name)),
      make("dd", { dir: "auto", className: long(value(name, k)), textContent: shownAs(name, value(name, k)) }));
  }
  return list;
};
const ABOUT = ["target", "left_out_prediction", "region", "loss", "left_out_loss", "deviation", "leverage"];
const DERIVED = new Set([...ABOUT, "rank", "tokens", "loss_per_token", "variance_error", "index", "kind", "prediction", "error", "variance", "self_influence"]);
const inputs = data.inputs.slice(0, 12);
const metadata = data.columns.map((c) => c.name)
  .filter((name) => !DERIVED.has(name) && !data.inputs.includes(name)).slice(0, 5);
const extra = [...metadata, ...inputs];
const folded = (k, names) => {
  if (names.length === 0) return null;
  const part = make("details", {}, make("summary", { textContent: "what the model sees" }), known(k, names));
  part.open = names.length <= 4;
  return part;
};
const about = (k, names = [...ABOUT, ...extra], more = "") => [
  make("h4", { dir: "auto", textContent: `Example ${value("index", k)}${more && ": "}${more}` }),
  tile(k, 96), words(data.texts?.[k]), known(k, names),
];

const card = $("card");
const pointAt = (k, x, y) => {
  card.replaceChildren(...about(k).filter((part) => part !== null));
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  const left = x + 18 + width < innerWidth ? x + 18 : Math.max(4, x - width - 18);
  card.style.left = left + "px";
  card.style.top = Math.max(4, Math.min(y + 12, innerHeight - height - 4)) + "px";
};
const lookAt = (k) => {
  if (focus === null) return;
  focus.data = k === null ? { x: [], y: [] } : { x: [points.data.x[k]], y: [points.data.y[k]] };
};

// Which rows are meant.
const haystack = Array.from({ length: n }, (_, k) =>
  [...data.columns.filter((c) => !c.number || c.name === "index").map((c) => said(c.values[k])), data.texts?.[k] ?? ""]
    .join("\n").toLowerCase());
const allowed = (k) => (!state.words || haystack[k].includes(state.words)) &&
  Object.entries(state.where).every(([name, v]) => v === "" || said(value(name, k)) === v);
const refresh = () => {
  const pass = Array.from({ length: n }, (_, k) => allowed(k));
  const free = !pass.includes(false);
  if (shown !== null) shown.booleans = free ? null : pass;
  listed = [];
  for (let k = 0; k < n; k++) if (pass[k] && (state.brush === null || state.brush.has(k))) listed.push(k);
  if (state.by !== null) {
    const values = columns.get(state.by).values, sign = state.down ? -1 : 1;
    const order = (a, b) => typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b;
    listed.sort((a, b) => values[a] === null ? 1 : values[b] === null ? -1 : sign * order(values[a], values[b]) || a - b);
  }
  state.page = 0;
  const count = (m) => m.toLocaleString("en");
  $("count").textContent = `${count(listed.length)} of ${count(n)} examples` +
    (n < data.n ? ` (${count(data.n)} in all)` : "") + (state.brush === null ? "" : ", inside the box");
  rows();
};

// The table: one page of it at a time.
const body = $("table").tBodies[0];
const rows = () => {
  const pages = Math.max(1, Math.ceil(listed.length / PAGE));
  const part = listed.slice(state.page * PAGE, (state.page + 1) * PAGE);
  body.replaceChildren(...part.map((k, place) => {
    const row = make("tr", { tabIndex: place === 0 ? 0 : -1 });
    row.dataset.k = k;
    if (data.across !== null) row.append(make("td", {}, tile(k, 32)));
    if (data.texts) row.append(make("td", { className: "text long", dir: "auto" }, make("div", { textContent: data.texts[k] })));
    for (const c of data.columns)
      row.append(make("td", { className: c.number ? "number" : long(c.values[k]), dir: c.number ? "ltr" : "auto",
        textContent: shownAs(c.name, c.values[k]) }));
    return row;
  }));
  $("where").textContent = `Page ${state.page + 1} of ${pages}`;
  $("back").disabled = state.page === 0;
  $("next").disabled = state.page >= pages - 1;
  for (const button of $("table").tHead.querySelectorAll("button[data-name]"))
    button.closest("th").ariaSort = button.dataset.name !== state.by ? "none" : state.down ? "descending" : "ascending";
};
const head = make("tr");
if (data.across !== null) head.append(make("th", { scope: "col" }, make("span", { className: "hidden", textContent: "image" })));
if (data.texts) head.append(make("th", { scope: "col" }, make("button", { type: "button", disabled: true, textContent: "text" })));
for (const c of data.columns) {
  const button = make("button", { type: "button", textContent: title(c.name), title: meaning(c.name) });
  button.dataset.name = c.name;
  button.onclick = () => {
    state.down = state.by === c.name ? !state.down : c.number && c.name !== "rank";
    state.by = c.name;
    refresh();
  };
  head.append(make("th", { scope: "col", className: c.number ? "number" : "" }, button));
}
$("table").tHead.append(head);
$("back").onclick = () => { state.page -= 1; rows(); };
$("next").onclick = () => { state.page += 1; rows(); };
const rowOf = (event) => event.target.closest("tr[data-k]");
body.addEventListener("focusin", (event) => {
  const row = rowOf(event), box = row.getBoundingClientRect();
  lookAt(Number(row.dataset.k));
  if (row.matches(":focus-visible")) pointAt(Number(row.dataset.k), Math.min(box.left + 60, innerWidth / 2), box.bottom);
});
body.addEventListener("focusout", () => { lookAt(null); card.hidden = true; });
body.addEventListener("mouseover", (event) => { const row = rowOf(event); if (row) lookAt(Number(row.dataset.k)); });
body.addEventListener("mouseleave", () => lookAt(null));
body.addEventListener("keydown", (event) => {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const other = step && rowOf(event)?.[step];
  if (!other) return;
  rowOf(event).tabIndex = -1;
  other.tabIndex = 0;
  other.focus();
  event.preventDefault();
});
addEventListener("keydown", (event) => { if (event.key === "Escape") card.hidden = true; });

// Filters, colours, saving.
let waiting = 0;
$("search").oninput = (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { state.words = event.target.value.trim().toLowerCase(); refresh(); }, 120);
};
$("region").onchange = (event) => { state.where.region = event.target.value; refresh(); };
for (const name of data.filters) {
  const distinct = [...new Set(columns.get(name).values.map(said))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const select = make("select", {}, new Option("all", ""), ...distinct.map((v) => new Option(v, v)));
  select.onchange = () => { state.where[name] = select.value; refresh(); };
  $("by").append(make("label", {}, title(name) + " ", select), " ");
}
$("clear").onclick = () => {
  Object.assign(state, { words: "", where: {}, brush: null, by: "rank", down: false });
  $("search").value = "";
  for (const select of document.querySelectorAll("#region, #by select")) select.value = "";
  if (points !== null) { own = true; points.selected.indices = []; own = false; }
  refresh();
};
const quoted = (v) => /[",\r\n]/.test(v) ? `"${v.replaceAll('"', '""')}"` : v;
const save = (name, header, lines) => {
  const text = [header, ...lines].map((line) => line.map((v) => quoted(said(v))).join(",")).join("\r\n") + "\r\n";
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
$("export").onclick = () => save("examples.csv",
  [...columns.keys(), ...(data.texts ? ["text"] : [])],
  listed.map((k) => [...data.columns.map((c) => c.values[k]), ...(data.texts ? [data.texts[k]] : [])]));

const colourings = (name) => {
  const COLOURS = night() ? DARK : LIGHT;
  const values = columns.get(name).values;
  const numbers = values.some((v) => typeof v === "number" && v % 1 !== 0);
  if (numbers) {
    const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
    const cuts = STEPS.slice(1).map((_, i) => sorted[Math.floor((i + 1) * sorted.length / STEPS.length)]);
    const names = STEPS.map((_, i) => i === 0 ? `below ${cuts[0]}` : `from ${cuts[i - 1]}`);
    const of = values.map((v) => v === null ? 0 : cuts.filter((c) => v >= c).length);
    return { names, of, colours: STEPS, marks: STEPS.map(() => "circle") };
  }
  const many = new Map();
  for (const v of values) many.set(said(v), (many.get(said(v)) ?? 0) + 1);
  let names = [...many.keys()].sort((a, b) => many.get(b) - many.get(a));
  const fixed = name === "region" ? ["regular", "uncertain", "unpredictable", "memorable"] : null;
  if (fixed) names = fixed;
  else if (names.length > COLOURS.length) names = [...names.slice(0, COLOURS.length - 1), "others"];
  if (!fixed && names.at(-1) !== "others") names.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const places = new Map(names.map((v, i) => [v, i]));
  return { names, of: values.map((v) => places.get(said(v)) ?? names.length - 1), colours: COLOURS,
    marks: fixed ? ["circle", "square", "triangle", "diamond"] : MARKS };
};
const paint = () => {
  const { names, of, colours, marks } = colourings($("colour").value);
  if (points !== null)
    points.data = { ...points.data, colour: of.map((i) => colours[i]), mark: of.map((i) => marks[i]) };
  $("legend").replaceChildren(...names.map((name, i) => {
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    picture.setAttribute("viewBox", "0 0 14 14");
    picture.setAttribute("aria-hidden", "true");
    path.setAttribute("d", SHAPES[marks[i]]);
    path.setAttribute("fill", colours[i]);
    picture.append(path);
    return make("li", { dir: "auto" }, picture, name === "" ? "(none)" : name);
  }));
};
for (const name of data.colours) $("colour").append(new Option(title(name), name));
$("colour").onchange = paint;

// Suspicious examples: keep, relabel or drop.
const decisions = new Map();
const complete = ({ action, label }) => action !== "relabel" || (label.value.trim() !== "" && !Number.isNaN(Number(label.value)));
const decided = () => {
  const whole = [...decisions.values()].filter(complete);
  const count = (action) => whole.filter((d) => d.action === action).length;
  const open = decisions.size - whole.length;
  $("decided").textContent = (decisions.size
    ? `${count("drop")} to drop, ${count("relabel")} to relabel, ${count("keep")} to keep` : "nothing decided yet") +
    (open ? `; ${open} without a new ${data.classes.length ? "label" : "target"}` : "");
  $("save").disabled = whole.length === 0;
};
const WRONG = data.classes.length ? "label probably wrong" : columns.has("target") ? "target far from the prediction" : "hard to predict";
const MEANS = { label: WRONG, unfamiliar: "unlike the others" };
const verdict = (k, kind, other, twin) => {
  if (kind === "label" && other !== undefined) return `labelled ${said(value("target", k))}, looks like ${said(other)}`;
  return kind === "duplicate" ? `there twice, see example ${twin}` : MEANS[kind];
};
const suspect = ({ row: k, kind, proposed, twin, wrong }) => {
  const other = data.classes.find(([c]) => c === proposed)?.[1];
  const answer = value("left_out_prediction", k) === null ? "prediction" : "left_out_prediction";
  const repeats = kind === "label" && other !== undefined && value(answer, k) === other; // the heading says it
  const names = [...(repeats ? [] : ["target", answer]), ...metadata]; // the heading repeats both
  const item = make("li", {}, ...about(k, names, verdict(k, kind, other, twin)).filter((p) => p !== null));
  if (kind === "label" && wrong !== null) item.querySelector("dl").prepend(
    make("dt", {}, word("label is wrong")), make("dd", { textContent: `${Math.min(99, Math.round(100 * wrong))}%` }));
  const label = data.classes.length
    ? make("select", { ariaLabel: "new label" }, ...(other === undefined ? [new Option("new label", "")] : []),
      ...data.classes.map(([c, name]) => new Option(said(name), said(c), false, c === proposed)))
    : make("input", { ariaLabel: "new target", size: 8, inputMode: "decimal", placeholder: "new target", value: said(proposed) });
  const set = make("fieldset", {}, make("legend", { className: "hidden", textContent: "Decision on example " + value("index", k) }));
  const choose = (action) => {
    decisions.set(k, { action, label });
    item.dataset.action = action;
    decided();
  };
  for (const action of columns.has("target") ? ["keep", "drop", "relabel"] : ["keep", "drop"]) {
    const radio = make("input", { type: "radio", name: "decision-" + k, value: action });
    radio.onchange = () => choose(action);
    const choice = make("label", {}, radio, " " + action);
    set.append(action === "relabel" ? make("span", {}, choice, " ", label) : choice);
    if (action === "relabel")
      label.oninput = () => { radio.checked = true; choose("relabel"); };
  }
  item.append(...[folded(k, inputs), set].filter((part) => part !== null));
  return item;
};
if ($("gallery")) {
  let cards = 0;
  const more = () => {
    const first = cards;
    $("gallery").append(...data.suspects.slice(cards, cards + data.first).map(suspect));
    cards = Math.min(cards + data.first, data.suspects.length);
    const remaining = data.suspects.length - cards;
    $("more").hidden = remaining === 0;
    $("more").textContent = `Show ${Math.min(data.first, remaining)} more (${remaining} left)`;
    if (first) $("gallery").children[first].querySelector("input").focus();
  };
  more();
  decided();
  $("more").onclick = more;
  $("save").onclick = () => {
    const rows = [...decisions].filter(([, d]) => complete(d))
      .map(([k, d]) => [value("index", k), d.action, d.action === "relabel" ? d.label.value.trim() : null]);
    save("decisions.csv", ["index", "action", "label"], rows);
  };
}

// Test examples and their neighbours.
const testCard = (place) => {
  const t = data.tests[place];
  $("test").value = String(place);
  $("earlier").disabled = place === 0;
  $("later").disabled = place === data.tests.length - 1;
  const list = make("dl");
  for (const name of ["target", "prediction", "loss"])
    if (t[name] !== undefined) list.append(make("dt", {}, word(name === "loss" ? data.loss : name)), make("dd", { textContent: name === "loss" ? two(t[name]) : said(t[name]) }));
  for (const [name, v] of t.inputs.slice(0, 12))
    list.append(make("dt", { textContent: name }), make("dd", { dir: "auto", textContent: said(v) }));
  $("tested").replaceChildren(make("div", { className: "card" },
    make("h4", { textContent: "Test example " + t.index }),
    tile(data.testsPictured ? n + place : null, 96), words(t.text), list));
  for (const side of ["helpful", "harmful"])
    $(side).replaceChildren(...t[side].length ? t[side].map(([k, rise]) => make("li", {},
      make("h4", { textContent: `Example ${value("index", k)}` + (rise === null ? "" : `: ${rise > 0 ? "+" : ""}${two(rise)}`) }),
      tile(k, 64), words(data.texts?.[k]), known(k, ["target", "left_out_prediction", ...extra]))) : [make("li", { textContent: "No example does." })]);
};
if ($("test")) {
  data.tests.forEach((t, i) => $("test").append(new Option(
    `${t.index}${t.target === undefined ? "" : `: ${t.target}, predicted ${t.prediction}`}, ${data.loss} ${two(t.loss)}`, String(i))));
  $("test").onchange = () => testCard(Number($("test").value));
  $("earlier").onclick = () => testCard(Number($("test").value) - 1);
  $("later").onclick = () => testCard(Number($("test").value) + 1);
  testCard(0);
}

// Charts follow the page's colours, also on paper.
const dressed = () => {
  paint();
  const style = getComputedStyle(document.documentElement);
  const [ink, line, paper] = ["--ink", "--line", "--paper"].map((v) => style.getPropertyValue(v).trim());
  for (const doc of Bokeh.documents) for (const model of doc._all_models.values()) {
    if ("axis_label_text_color" in model) model.setv({ axis_label_text_color: ink, major_label_text_color: ink,
      axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal",
      axis_label_text_font_size: "13px", major_label_text_font_size: "12px" });
    if ("grid_line_color" in model) model.setv({ grid_line_color: line, grid_line_alpha: 0.6 });
    if (model.type === "Label") model.setv({ text_color: ink, background_fill_color: paper });
    if (model.type === "Legend") model.setv({ label_text_color: ink, background_fill_alpha: 0, border_line_color: null,
      orientation: narrow.matches ? "vertical" : "horizontal" });
  }
};
const start = async () => {
  if (points !== null || document.documentElement.dataset.map) return;
  document.documentElement.dataset.map = "begun";
  Bokeh.set_log_level("error");
  await Promise.all(Object.entries(data.charts).map(([name, item]) => Bokeh.embed.embed_item(item, "chart-" + name)));
  const find = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find((m) => m !== null);
  points = find("points"); focus = find("focus"); shown = find("shown");
  dressed();
  dark.addEventListener("change", dressed);
  narrow.addEventListener("change", dressed);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printed");
    dressed();
    for (const view of [...Bokeh.index.roots].filter((v) => v.canvas_view)) { // a picture that nothing lays out again
      view.after_resize();
      view.paint();
      const picture = view.export("png").canvas;
      picture.className = "picture";
      view.el.parentNode.append(picture);
    }
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printed");
    document.querySelectorAll(".picture").forEach((picture) => picture.remove());
    dressed();
  });
  points.selected.properties.indices.change.connect(() => {
    if (own) return;
    const { indices } = points.selected;
    state.brush = indices.length ? new Set(indices) : null;
    refresh();
  });
  const place = { x: 0, y: 0 };
  $("chart-map").addEventListener("pointermove", (event) => { place.x = event.clientX; place.y = event.clientY; }, true);
  $("chart-map").addEventListener("pointerleave", () => { card.hidden = true; });
  points.inspect.connect(() => {
    const [k] = points.inspected.indices;
    if (k === undefined) card.hidden = true;
    else pointAt(k, place.x, place.y);
  });
  refresh();
  document.documentElement.dataset.map = "yes";
};
// Tables wider than the page say so.
const hints = new Map([...document.querySelectorAll(".scroll")].map((box) => {
  const hint = make("p", { className: "hint", hidden: true, textContent: "More columns to the right: scroll, or use the arrow keys →" });
  box.before(hint);
  return [box, hint];
}));
const hinted = () => { for (const [box, hint] of hints) hint.hidden = box.scrollWidth <= box.clientWidth + 1; };
const watch = new ResizeObserver(hinted);
for (const box of hints.keys()) { watch.observe(box); watch.observe(box.firstElementChild); }
// The map is drawn when somebody opens it; a link opens what it points into.
$("all").addEventListener("toggle", () => { if ($("all").open) start(); });
const unfold = () => document.querySelector(location.hash || null)?.querySelector(":scope > details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => {
  document.querySelector(link.hash).querySelector(":scope > details")?.setAttribute("open", "");
});
unfold();
refresh();
paint();
hinted();
document.documentElement.dataset.ready = "yes";
