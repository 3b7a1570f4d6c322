"use strict";
// The report of runs: tables of steps and settings, and a viewer of responses.
// The viewer's state is the fragment of the URL, so that a link shares it.
const ROW = 24; // Row height of a scrolling table, in pixels.
const BLOCK = 500; // Responses per element of per-token data.
const COLORS = ["advantage", "value", "logprob_diff", "origin"];
const LABELS = {
  advantage: "advantage",
  value: "value (of the state before the token)",
  logprob_diff: "log-prob of the sampler minus that of the trainer",
  origin: "origin",
};
const ORIGINS = { policy: "#dbe9f6", environment: "#c9ecdf", given: "#f0d6e5" };
const FILTERS = [
  ["run", "run", "name"],
  ["step", "step", "3 or 1..9"],
  ["prompt", "prompt", "text or example id"],
  ["group", "group", "id"],
  ["reward", "reward", "-1..0.5"],
  ["length", "length", "100..200"],
  ["status", "status", []],
  ["correct", "correct", ["yes", "no", "no verdict"]],
  ["text", "response", "text"],
];
const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;

function make(tag, properties, ...children) {
  // Texts become text nodes, so that the output of a run is never markup.
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((x) => x !== null && x !== undefined));
  return element;
}

function visible(text) {
  // Escapes characters that would hide or reorder the text around them.
  return String(text).replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
  );
}

function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") {
    const small = value !== 0 && Math.abs(value) < 1e-3;
    return small ? value.toExponential(2) : String(+value.toPrecision(Number.isInteger(value) ? 15 : 4));
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return visible(JSON.stringify(value));
  return visible(value);
}

// A table that renders only its visible rows.
class Rows {
  constructor(columns, { click, sort } = {}) {
    this.columns = columns;
    this.rows = [];
    this.here = null;
    this.click = click;
    const head = columns.map((column) =>
      make("th", {
        textContent: column.label,
        title: column.title || column.label,
        className: (column.number ? "number" : "") + (sort ? " sorts" : ""),
        onclick: () => sort && sort(column.name),
      }),
    );
    this.body = make("tbody");
    const widths = columns.map((column) => {
      const col = make("col");
      col.style.width = column.width;
      return col;
    });
    const tops = [make("colgroup", {}, ...widths), make("thead", {}, make("tr", {}, ...head))];
    this.head = head;
    this.element = make("div", { className: "scroll" }, make("table", {}, ...tops, this.body));
    this.element.onscroll = () => this.draw();
  }

  show(rows, here = null) {
    this.rows = rows;
    this.here = here;
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - 10);
    const last = Math.min(this.rows.length, first + Math.ceil((clientHeight || 600) / ROW) + 20);
    const space = (count) => {
      const row = make("tr");
      row.style.height = count * ROW + "px";
      return row;
    };
    const drawn = this.rows.slice(first, last).map((row) => {
      const cells = this.columns.map((column) =>
        make("td", { textContent: column.text(row), className: column.number ? "number" : "" }),
      );
      const onclick = () => this.click && this.click(row);
      return make("tr", { className: row === this.here ? "here" : "", onclick }, ...cells);
    });
    this.body.replaceChildren(space(first), ...drawn, space(this.rows.length - last));
  }
}

// --- Steps and settings.

function stepColumns(all) {
  const known = [];
  for (const run of data.runs) {
    for (const name of run.names) if (!known.includes(name)) known.push(name);
  }
  const chosen = all
    ? known.filter((name) => name !== "step").sort()
    : data.columns.filter(([name]) => known.includes(name)).map(([name]) => name);
  const labels = Object.fromEntries(data.columns);
  const columns = [["step", "step"], ...chosen.map((name) => [name, all ? name : labels[name]])];
  const found = columns.map(([name, label]) => {
    const places = data.runs.map((run) => [run.names.indexOf(name), run.names.indexOf(name + "_se")]);
    const text = ([run, row]) => {
      const [place, error] = places[run].map((i) => (i < 0 ? null : row[i]));
      return format(place) + (error && !all ? " ±" + format(error) : "");
    };
    const width = Math.max(6, label.length * 0.62 + 1.5) + "em";
    return { name, label, title: name, text, number: true, width };
  });
  if (several) {
    const text = ([run]) => data.runs[run].name;
    found.unshift({ name: "run", label: "run", text, width: "12em" });
  }
  return found;
}

function drawSteps() {
  const all = make("input", { type: "checkbox", id: "all" });
  const rows = data.runs.flatMap((run, i) => run.rows.map((row) => [i, row]));
  const place = make("div");
  const draw = () => {
    const table = new Rows(stepColumns(all.checked));
    place.replaceChildren(table.element);
    table.show(rows);
  };
  all.onchange = draw;
  document.getElementById("steps").append(
    make("h2", {}, "Steps ", make("label", { className: "caption" }, all, " all metrics")),
    place,
  );
  draw();
}

function drawSettings() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
  if (!keys.length) return;
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const marked = (key) =>
    data.runs.some(
      (run) =>
        (key in data.defaults && !same(run.settings[key], data.defaults[key])) ||
        !same(run.settings[key], data.runs[0].settings[key]),
    );
  const table = (chosen) => {
    const head = ["setting", ...data.runs.map((run) => run.name), "default"];
    const texts = (key) => [...data.runs.map((run) => run.settings[key]), data.defaults[key]].map(format);
    const line = (key) => {
      const cells = [visible(key), ...texts(key)].map((text) => make("td", { textContent: text }));
      return make("tr", { className: marked(key) ? "differs" : "" }, ...cells);
    };
    const heads = head.map((text) => make("th", { textContent: text }));
    return make("table", { className: "settings" }, make("tr", {}, ...heads), ...chosen.map(line));
  };
  const own = keys.filter(marked);
  const fold = (title, chosen, open) =>
    make("details", { open }, make("summary", { textContent: title }), table(chosen));
  document.getElementById("settings").append(
    make("h2", { textContent: "Settings" }),
    fold(`${own.length} settings that differ from the defaults`, own, true),
    fold(`all ${keys.length} settings`, keys, false),
  );
}

function drawSeconds() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.seconds)))];
  const line = (cells, tag) =>
    make("tr", {}, ...cells.map((text, i) => make(tag, { textContent: text, className: i ? "number" : "" })));
  const lines = names.map((name) => line([name, ...data.runs.map((run) => format(run.seconds[name]))], "td"));
  const table = make("table", {}, line(["", ...data.runs.map((run) => run.name)], "th"), ...lines);
  document.getElementById("seconds").append(
    make("h2", { textContent: "Time spent" }),
    make("details", {}, make("summary", { textContent: "seconds by phase" }), table),
    make("p", { className: "caption", textContent: data.meaning }),
  );
}

// --- Responses.

const samples = data.samples.map((values, index) => {
  const sample = { index };
  data.fields.forEach((name, i) => (sample[name] = values[i]));
  sample.prompt = data.prompts[sample.prompt];
  return sample;
});
let state = {};

function perToken(sample) {
  const block = document.getElementById("tokens" + Math.floor(sample.index / BLOCK));
  const line = block && block.textContent.split("\n")[(sample.index % BLOCK) + 1];
  return line ? JSON.parse(line) : {};
}

function inRange(text) {
  // "3" is a single number; "1..9", "1.." and "..9" are closed intervals.
  const [low, high] = text.includes("..") ? text.split("..") : [text, text];
  const from = low.trim() === "" ? -Infinity : Number(low);
  const to = high.trim() === "" ? Infinity : Number(high);
  return (x) => x !== null && x !== undefined && x >= from && x <= to;
}

function contains(text) {
  const wanted = text.toLowerCase();
  return (x) => x !== null && x !== undefined && String(x).toLowerCase().includes(wanted);
}

function verdict(sample) {
  if (sample.correct === null || sample.correct === undefined) return "no verdict";
  return sample.correct ? "yes" : "no";
}

function tests() {
  const found = [];
  const add = (name, condition) => {
    if (state[name]) found.push(condition(state[name]));
  };
  const within = (name, by) => (text) => {
    const test = by(text);
    return (sample) => test(sample[name]);
  };
  for (const name of ["step", "reward", "length"]) add(name, within(name, inRange));
  add("text", within("response", contains));
  add("run", (text) => (sample) => data.runs[sample.run].name === text);
  add("group", (text) => (sample) => String(sample.group) === text);
  add("status", (text) => (sample) => sample.stop === text);
  add("correct", (text) => (sample) => verdict(sample) === text);
  add("prompt", (text) => {
    const test = contains(text);
    return (sample) => test(sample.prompt) || test(sample.example);
  });
  return found;
}

function chosen() {
  const wanted = tests();
  const found = samples.filter((sample) => wanted.every((test) => test(sample)));
  const by = (state.sort || "").replace(/^-/, "");
  if (!by) return found;
  const sign = state.sort.startsWith("-") ? -1 : 1;
  const key = by === "correct" ? verdict : by === "run" ? (x) => x.run : (x) => x[by];
  return found.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    // Missing values come last, in both directions.
    if (x === null || x === undefined) return y === null || y === undefined ? 0 : 1;
    if (y === null || y === undefined) return -1;
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}

function go(changes) {
  state = { ...state, ...changes };
  const kept = Object.entries(state).filter(([, x]) => x !== "" && x !== null);
  const fragment = "#" + new URLSearchParams(kept);
  history.replaceState(null, "", fragment);
  update();
}

const oneLine = (text) => visible(String(text).slice(0, 300).replace(/\s+/g, " "));
const COLUMNS = [
  { name: "step", label: "step", text: (x) => format(x.step), number: true, width: "3.6em" },
  { name: "group", label: "group", text: (x) => format(x.group), number: true, width: "5em" },
  { name: "reward", label: "reward", text: (x) => format(x.reward), number: true, width: "5.6em" },
  { name: "correct", label: "correct", text: verdict, width: "6.2em" },
  { name: "length", label: "length", text: (x) => format(x.length), number: true, width: "5.6em" },
  { name: "stop", label: "status", text: (x) => x.stop, width: "5.5em" },
  { name: "prompt", label: "prompt", text: (x) => oneLine(x.prompt), width: "10em" },
  { name: "response", label: "response", text: (x) => oneLine(x.response), width: "auto" },
];
let table, count, inputs, detail;

function drawViewer() {
  const place = document.getElementById("responses");
  place.append(make("h2", { textContent: "Responses" }));
  if (!samples.length) {
    place.append(make("p", { textContent: "This run logged no responses: run.samples_every is 0." }));
    return;
  }
  const statuses = [...new Set(samples.map((sample) => sample.stop))].sort();
  inputs = {};
  const shown = FILTERS.filter(([name]) => name !== "run" || several);
  const labels = shown.map(([name, label, hint]) => {
    let choices = name === "status" ? statuses : hint;
    if (name === "run") choices = data.runs.map((run) => run.name);
    if (Array.isArray(choices)) {
      const options = choices.map((text) => make("option", { value: text, textContent: text }));
      inputs[name] = make("select", { name }, make("option", { value: "", textContent: "any" }), ...options);
    } else {
      inputs[name] = make("input", { name, placeholder: hint, type: "search" });
    }
    inputs[name].oninput = () => go({ [name]: inputs[name].value.trim() });
    return make("label", {}, label + " ", inputs[name]);
  });
  count = make("span", { id: "count" });
  const clear = make("button", {
    textContent: "clear",
    onclick: () => go({ ...Object.fromEntries(FILTERS.map(([name]) => [name, ""])), sort: "" }),
  });
  const columns = several
    ? [{ name: "run", label: "run", text: (x) => data.runs[x.run].name, width: "8em" }, ...COLUMNS]
    : COLUMNS;
  table = new Rows(columns, {
    click: (sample) => go({ open: String(sample.index) }),
    sort: (name) => go({ sort: state.sort === name ? "-" + name : name }),
  });
  table.element.id = "list";
  detail = make("div", { id: "detail" });
  place.append(
    make("div", { id: "filters" }, ...labels, clear, count),
    make("div", { id: "viewer" }, table.element, detail),
  );
  window.onhashchange = read;
  read();
}

function read() {
  state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  update();
}

function update() {
  for (const [name, input] of Object.entries(inputs)) {
    if (input !== document.activeElement) input.value = state[name] || "";
  }
  const found = chosen();
  const open = samples[state.open];
  count.textContent = `${found.length} of ${samples.length} responses`;
  table.head.forEach((head, i) => {
    const { name, label } = table.columns[i];
    const arrows = { [name]: " ▲", ["-" + name]: " ▼" };
    head.textContent = label + (arrows[state.sort] || "");
  });
  table.show(found, open);
  if (open) drawDetail(open, found);
  else detail.replaceChildren(make("p", { className: "none", textContent: "Choose a response." }));
}

function drawDetail(sample, found) {
  const place = found.indexOf(sample);
  const move = (text, by) =>
    make("button", {
      textContent: text,
      disabled: place < 0 || !found[place + by],
      onclick: () => go({ open: String(found[place + by].index) }),
    });
  const group = make("button", {
    textContent: "show group",
    onclick: () => go({ group: String(sample.group), step: String(sample.step) }),
  });
  const facts = { reward: sample.reward };
  for (const [name, value] of Object.entries(sample.parts || {})) facts["part " + name] = value;
  Object.assign(facts, { correct: verdict(sample), length: sample.length, status: sample.stop });
  Object.assign(facts, { gold: sample.gold, extracted: sample.extracted });
  for (const name of ["error", "example", "group", "sample"]) {
    if (sample[name] !== null && sample[name] !== undefined) facts[name] = sample[name];
  }
  const lines = Object.entries(facts).map(([name, value]) =>
    make("tr", {}, make("th", { textContent: visible(name) }), make("td", { textContent: format(value) })),
  );
  detail.replaceChildren(
    make("div", {}, move("previous", -1), " ", move("next", 1), " ", sample.group === null ? "" : group),
    make("table", { id: "facts" }, ...lines),
    make("div", { className: "author", textContent: "prompt" }),
    make("pre", { id: "prompt", textContent: visible(sample.prompt) }),
    ...response(sample),
  );
}

function response(sample) {
  const known = perToken(sample);
  if (!known.tokens) {
    const note = sample.index < data.left_out ? "Tokens are omitted to limit the size of the page." : "";
    const title = make("div", { className: "author", textContent: `response. ${note}` });
    return [title, make("pre", { id: "response", textContent: visible(sample.response) })];
  }
  const kinds = COLORS.filter((name) => known[name]);
  const kind = kinds.includes(state.color) ? state.color : kinds[0];
  const options = kinds.map((name) => make("option", { value: name, textContent: LABELS[name] }));
  const select = make("select", { id: "color", onchange: () => go({ color: select.value }) }, ...options);
  select.value = kind;
  const [paint, legend] = palette(kind, known);
  const turns = make("div", { id: "response" });
  let start = 0;
  for (const [author, size] of known.origin) {
    const tokens = [];
    for (let i = start; i < start + size; i++) {
      const numbers = COLORS.filter((name) => name !== "origin" && known[name]).map(
        (name) => `${LABELS[name]}: ${format(known[name][i])}`,
      );
      const token = make("span", {
        textContent: visible(known.tokens[i]).replace(/\n/g, "↵\n"),
        title: [`token ${i}, ${author}: ${JSON.stringify(known.tokens[i])}`, ...numbers].join("\n"),
      });
      token.style.background = kind === "origin" ? ORIGINS[author] : paint(known[kind][i]);
      tokens.push(token);
    }
    const label = make("div", { className: "author", textContent: `${author}, ${size} tokens` });
    turns.append(make("div", { className: "turn " + author }, label, make("div", {}, ...tokens)));
    start += size;
  }
  return [make("div", { className: "caption" }, "colour ", select, " ", legend), turns];
}

// Returns a function from a number to a colour, and the legend.
function palette(kind, known) {
  if (kind === "origin") {
    const swatches = Object.entries(ORIGINS).map(([name, color]) => {
      const swatch = make("span", { className: "swatch", textContent: name });
      swatch.style.background = color;
      return swatch;
    });
    return [null, make("span", { id: "legend" }, ...swatches)];
  }
  // The scale is centered at 0 for advantages and differences, and at the middle
  // of the range for values.
  const numbers = known[kind].filter((x) => x !== null);
  const [low, high] = [(m, x) => Math.min(m, x), (m, x) => Math.max(m, x)].map((f) => numbers.reduce(f));
  const middle = kind === "value" ? (low + high) / 2 : 0;
  const most = Math.max(high - middle, middle - low, 1e-9);
  const paint = (x) => {
    if (x === null) return "none";
    const alpha = (0.75 * Math.abs(x - middle)) / most;
    return `rgba(${x < middle ? "213, 94, 0" : "0, 114, 178"}, ${alpha.toFixed(3)})`;
  };
  const bar = make("span", { className: "bar" });
  bar.style.background = `linear-gradient(to right, ${paint(middle - most)}, white, ${paint(middle + most)})`;
  const ends = [middle - most, middle + most].map(format);
  const legend = make("span", { id: "legend" }, ends[0], bar, ends[1], ` (white: ${format(middle)}, or missing)`);
  return [paint, legend];
}

drawSteps();
drawSettings();
drawViewer();
drawSeconds();
