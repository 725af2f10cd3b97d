"use strict";
// Records come from api/run/ID, and later ones from api/events; see records.py for their form.
const FIELDS = ["rank", "state", "retries", "host", "epoch", "batch", "of", "rows", "staleness",
  "cpu", "memory", "start", "read", "compute", "evaluate", "exchange", "wait"];
const PHASES = { read: "sky", compute: "green", evaluate: "yellow", exchange: "orange", wait: "grey" };
const PHASE_NAMES = { read: "reading rows", compute: "training", evaluate: "evaluating",
  exchange: "exchange", wait: "waiting" };
const STATES = { joining: "sky", training: "green", waiting: "grey", finished: "blue", ended: "grey", lost: "red" };
const MOST = 2400;         // records of a kind; beyond, every second one is left out
const MOST_LINES = 400;    // log lines shown
const SLOW = 0.7;          // a worker below this share of the median speed is marked
const token = new URLSearchParams(location.search).get("token") || "";
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const url = path => path + "?token=" + encodeURIComponent(token);

let runs = [], chosen = null, followNewest = true, run = null, charts = {}, drawn = 0, waiting = false;

// ---- small helpers

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const short = (v, digits = 4) => v == null ? "–" : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3)
  ? v.toExponential(2) : (+v.toPrecision(digits)).toString();
const count = v => v == null ? "–" : v >= 1e6 ? (v / 1e6).toFixed(1) + " M" : v >= 1e4 ? (v / 1e3).toFixed(1) + " k"
  : Math.round(v).toLocaleString("en");
const bytes = v => v == null ? "–" : v >= 1e9 ? (v / 1e9).toFixed(1) + " GB" : v >= 1e6 ? (v / 1e6).toFixed(1) + " MB"
  : (v / 1e3).toFixed(0) + " kB";
function span(s) {
  if (s == null || !isFinite(s)) return "–";
  s = Math.round(s);
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60) + " s";
  return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
}
const median = a => { const s = [...a].sort((x, y) => x - y); return s.length ? s[s.length >> 1] : null; };

// ---- a run's data

function newRun(id) {
  return { id, begin: null, steps: [], epochs: [], workers: [], lines: [], end: null, states: new Map(), search: null, trials: new Map(), importances: {},
    keep: { step: [1, 0], workers: [1, 0] } };
}
function thin(list, kind, record) {  // the newest is always the last, whether it is kept or not
  const keep = run.keep[kind];
  if (keep[1]++ % keep[0] && list.length) list[list.length - 1] = record; else list.push(record);
  if (list.length > MOST) { run[kind === "step" ? "steps" : "workers"] = list.filter((_, i) => i % 2 === 0 || i === list.length - 1); keep[0] *= 2; }
}
function take(record) {
  switch (record.kind) {
    case "begin": run.begin = record; run.end = null; break;
    case "step": thin(run.steps, "step", record); break;
    case "epoch": run.epochs.push(record); break;
    case "workers": takeWorkers(record); break;
    case "log": run.lines = [...run.lines, ...record.lines.map(([rank, text]) => ({ rank, text, t: record.t }))].slice(-MOST_LINES); break;
    case "search": run.search = record; run.end = null; break;
    case "trial": case "point": case "rung": takeTrial(run, record); break;
    case "end": case "fail": run.end = record; break;
  }
}
function takeWorkers(record) {
  const list = record.workers.map(w => Object.fromEntries(FIELDS.map((name, i) => [name, w[i]])));
  for (const w of list) {
    const spans = run.states.get(w.rank) || [];
    const last = spans[spans.length - 1];
    if (last) last.to = record.t;
    if (!last || last.state !== w.state) spans.push({ state: w.state, from: record.t, to: record.t });
    if (spans.length > 400) spans.splice(0, 200);
    run.states.set(w.rank, spans);
  }
  const servers = record.servers || [], all = (own, part) => servers.reduce((sum, s) => sum + s[part], own);
  thin(run.workers, "workers", { t: record.t, in: all(record.in, 1), out: all(record.out, 2), list, hosts: record.hosts || [], servers });
}
function rates() {  // rows per second of each worker, between looks that are far enough apart
  const found = [];
  let before = null;
  for (const look of run.workers) {
    if (before && look.t - before.t < 0.4) continue;
    if (before) {
      const rows = new Map(before.list.map(w => [w.rank, w.rows]));
      found.push({ t: look.t, of: new Map(look.list.map(w => [w.rank,
        rows.has(w.rank) && w.rows >= rows.get(w.rank) ? (w.rows - rows.get(w.rank)) / (look.t - before.t) : null])) });
    }
    before = look;
  }
  return found;
}

// ---- drawing

function stateOf(worker) {  // the last look at the workers may be older than the end of the run
  if (!run.end || ["finished", "lost"].includes(worker.state)) return worker.state;
  return run.end.kind === "end" ? "finished" : "ended";
}
function drawLink() {
  const link = $("link");
  link.textContent = !answers ? "The driver does not answer: this is the last that it said." : run && run.end ? "ended" : "live";
  link.className = answers ? "" : "gone";
}
function draw() {
  waiting = false;
  drawn = performance.now();
  drawLink();
  const has = run && (run.begin || run.search);
  $("main").hidden = !has;
  $("empty").hidden = !!has;
  if (!has) return;
  document.body.dataset.kind = run.search ? "search" : "fit";
  if (run.search) {
    drawSearch(run);
    drawSettings();
    return;
  }
  const speeds = rates();
  drawHeadline(speeds);
  drawCurves();
  drawSpeed(speeds);
  drawWorkers(speeds);
  drawServers();
  drawHosts();
  drawLog();
  drawSettings();
}
function drawSoon() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => document.hidden ? waiting = false : requestAnimationFrame(draw),
    Math.max(0, 250 - (performance.now() - drawn)));
}
document.addEventListener("visibilitychange", drawSoon);

function card(what, value, note = "", share = null) {
  const made = el("div", { class: "card" }, el("div", { class: "what" }, what),
    el("div", { class: "value" }, value), el("div", { class: "note" }, note));
  if (share != null) {
    const fill = el("i");
    fill.style.width = (100 * share).toFixed(1) + "%";
    made.append(el("div", { class: "bar", role: "progressbar", "aria-valuenow": Math.round(100 * share) }, fill));
  }
  return made;
}
function lastOf(list) { return list.length ? list[list.length - 1] : null; }

function drawHeadline(speeds) {
  const { begin, end } = run, step = lastOf(run.steps), epoch = lastOf(run.epochs), look = lastOf(run.workers);
  const newest = !step || (epoch && epoch.t >= step.t) ? epoch : step;
  const doneNow = newest ? (newest === epoch ? epoch.epoch + 1 : step.epoch + step.batches / Math.max(1, step.of)) : begin.first_epoch;
  const share = Math.min(1, (doneNow - begin.first_epoch) / Math.max(1e-9, begin.epochs - begin.first_epoch));
  const now = Math.max(begin.t, newest ? newest.t : 0, look ? look.t : 0, end ? end.t : 0);
  const firstRows = run.steps.length ? run.steps[0] : run.epochs[0];
  let left = null;
  if (!end && firstRows && newest && newest.t > firstRows.t) {
    const from = firstRows.epoch + firstRows.batches / Math.max(1, firstRows.of);
    if (doneNow > from) left = (newest.t - firstRows.t) * (begin.epochs - doneNow) / (doneNow - from);
  }
  const current = Math.min(begin.epochs, Math.floor(doneNow) + 1);
  const state = end ? (end.kind === "fail" ? "Failed" : end.stopped ? "Stopped" : "Done") : newest ? "Training" : "Starting";
  const cards = [card(state, `Epoch ${end && end.kind === "end" ? Math.floor(doneNow) : current} of ${begin.epochs}`,
    end ? `took ${span(end.t - begin.t)}` : left != null ? `about ${span(left)} left` : `for ${span(now - begin.t)}`, share)];
  if (newest) {
    const metrics = newest.metrics, best = run.epochs.map(e => e.metrics.val_loss ?? e.metrics.loss).filter(v => v != null);
    cards.push(card("loss", short(metrics.loss), epoch && epoch.metrics.val_loss != null ? `validation ${short(epoch.metrics.val_loss)}`
      : best.length ? `best epoch ${short(Math.min(...best))}` : ""));
    const other = Object.keys(metrics).find(n => n !== "loss" && !n.startsWith("val_") && typeof metrics[n] === "number");
    if (other) cards.push(card(other, short(metrics[other]), epoch && epoch.metrics["val_" + other] != null ? `validation ${short(epoch.metrics["val_" + other])}` : ""));
    cards.push(card("Rows per second", count(newest.rows_per_s ?? (epoch && epoch.rows_per_s)), newest === epoch ? "all workers, last epoch" : "all workers, now"));
  }
  if (look) {
    const by = {};
    for (const w of look.list) by[stateOf(w)] = (by[stateOf(w)] || 0) + 1;
    const rest = Object.entries(by).filter(([s]) => s !== "training").map(([s, n]) => `${n} ${s}`).join(", ");
    cards.push(card("Workers", `${by.training || by.finished || 0} of ${begin.workers}`, by.finished === begin.workers ? "all finished" : rest || (end ? "ended" : "all training")));
    const earlier = run.workers[Math.max(0, run.workers.length - 12)], seconds = look.t - earlier.t;
    if (look.in + look.out > 0) cards.push(card("Traffic", bytes(seconds > 0 && !end ? (look.in - earlier.in + look.out - earlier.out) / seconds : look.in + look.out)
      + (seconds > 0 && !end ? "/s" : ""), `in ${bytes(look.in)}, out ${bytes(look.out)}`.replaceAll(/ (?=.B)/g, "\u00a0")));
  }
  const shown = $("headline").children;  // an equal card stays
  $("headline").replaceChildren(...cards.map((card, i) => shown[i] && shown[i].isEqualNode(card) ? shown[i] : card));
  $("error").hidden = !(end && end.kind === "fail");
  $("error").textContent = end && end.error || "";
}

function chart(key, host, options, data) {
  const width = host.clientWidth;
  const same = charts[key];
  if (same && same.signature === options.signature && same.host === host) {
    if (same.plot.width !== width) same.plot.setSize({ width, height: options.height });
    same.limits = options.limits;
    same.plot.setData(data);
    if (same.plot.cursor.idx == null) showLast(same.plot);
    return;
  }
  if (same) same.plot.destroy();
  host.replaceChildren();
  const axis = { stroke: () => css("ink-2"), grid: { stroke: () => css("grid"), width: 1 }, ticks: { stroke: () => css("grid"), width: 1 } };
  const plot = new uPlot({
    width, height: options.height, series: options.series, scales: { x: { time: false }, y: { range: (_, low, high) => uPlot.rangeNum(...(charts[key] && charts[key].limits || options.limits || [low, high]), 0.1, true) } }, legend: { live: options.live !== false, show: options.legend !== false },
    axes: [{ ...axis, values: options.xValues, incrs: WHOLE }, { ...axis, size: 64, values: (_, vs) => vs.map(v => v == null ? "" : options.yValues ? options.yValues(v) : short(v, 3)) }],
    cursor: { points: { size: 6 }, dataIdx: (u, line, at) => lastIn(u.data[line], at) },
    hooks: { setCursor: [u => { if (u.cursor.idx == null) showLast(u); }] },
  }, data, host);
  charts[key] = { plot, signature: options.signature, host, limits: options.limits };
  showLast(plot);
}
function lastIn(values, at) {  // the place of the last value up to there
  for (let i = at; i >= 0; i--) if (values[i] != null) return i;
  return at;
}
function showLast(plot) { plot.setLegend({ idxs: plot.data.map(values => lastIn(values, values.length - 1)) }, false); }

function drawCurves() {
  const names = [];
  for (const record of [...run.epochs.slice(-1), ...run.steps.slice(-1)])
    for (const [name, value] of Object.entries(record.metrics)) {
      const base = name.startsWith("val_") ? name.slice(4) : name;
      if (valuesOf(value).length && !names.includes(base)) names.push(base);
    }
  names.sort((a, b) => (b === "loss") - (a === "loss"));
  const host = $("curves");
  for (const old of [...host.children]) if (!names.includes(old.dataset.name)) { old.remove(); }
  const placeOf = name => [...host.children].find(c => c.dataset.name === name);
  for (const name of names) if (!placeOf(name))  // all before the first is drawn: they share the width
    host.append(el("div", { class: "card chart", "data-name": name }, el("h2", {}, name, el("small", {}, " by epoch")), el("div")));
  for (const name of names) {
    const place = placeOf(name);
    // A metric with several values, as one per class, has a line for each of them in each of the kinds.
    const many = Math.max(1, ...[...run.steps, ...run.epochs].map(r => valuesOf(r.metrics[name]).length));
    const held = run.epochs.some(e => e.metrics["val_" + name] != null), kinds = held ? 3 : 2;
    const points = new Map(), put = (x, kind, value) => {
      if (!points.has(x)) points.set(x, [x, ...Array(kinds * many).fill(null)]);
      valuesOf(value).forEach((one, i) => { points.get(x)[1 + kind * many + i] = one; });
    };
    for (const s of run.steps) put(s.epoch + s.batches / Math.max(1, s.of), 0, s.metrics[name]);
    for (const e of run.epochs) { put(e.epoch + 1, 1, e.metrics[name]); if (held) put(e.epoch + 1, 2, e.metrics["val_" + name]); }
    const rows = [...points.values()].sort((a, b) => a[0] - b[0]), data = [...Array(1 + kinds * many).keys()].map(c => rows.map(r => r[c]));
    const looks = [["so far in the epoch", { stroke: () => css("grey"), width: 1, points: { show: false } }], ["training", { stroke: () => css("blue"), width: 2, points: { size: 5 } }],
      ["validation", { stroke: () => css("orange"), width: 2, dash: [6, 4], points: { size: 5 } }]];
    const series = [{ label: "epoch", value: (_, v) => v == null ? "" : short(v, 3) }];
    for (const [label, look] of looks.slice(0, kinds))
      for (let i = 0; i < many; i++) series.push({ label: many > 1 ? `${label}, ${i}` : label, ...look, spanGaps: true, value: (_, v) => v == null ? "" : short(v) });
    chart("curve " + name, place.lastChild, { height: 240, signature: name + held + many + css("paper"), series, legend: many < 3, limits: limitsOf(name) }, data);
  }
}
const EARLY = 0.25;        // before this share of an epoch its mean so far is of few rows
function limitsOf(name) {  // lowest and highest of what tells: the first batches would stretch the axis
  const valuesIn = records => records.flatMap(r => [...valuesOf(r.metrics[name]), ...valuesOf(r.metrics["val_" + name])]).filter(v => v != null);
  const told = valuesIn([...run.epochs, ...run.steps.filter(s => s.batches >= EARLY * s.of)]);
  return told.length > 1 ? [Math.min(...told), Math.max(...told)] : null;
}

function valuesOf(value) {  // one for each line; null where it is no finite number
  return value == null ? [] : (Array.isArray(value) ? value.flat(Infinity) : [value]).map(v => typeof v === "number" ? v : null);
}

const WHOLE = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 864000];  // epochs, or seconds
const LINES = ["blue", "orange", "green", "purple", "yellow", "sky"];
function drawSpeed(speeds) {
  const ranks = [...run.states.keys()].sort((a, b) => a - b);
  $("speed-card").hidden = speeds.length < 2;
  if (speeds.length < 2) return;
  const x = speeds.map(s => s.t - run.begin.t), each = ranks.length <= LINES.length;
  let series, data;
  if (each) {
    series = ranks.map((rank, i) => ({ label: "rank " + rank, stroke: () => css(LINES[i]), width: 1.5, dash: i % 2 ? [5, 3] : undefined, points: { show: false } }));
    data = ranks.map(rank => speeds.map(s => s.of.get(rank) ?? null));
  } else {
    const at = pick => speeds.map(s => { const v = [...s.of.values()].filter(n => n != null).sort((a, b) => a - b); return v.length ? pick(v) : null; });
    series = [["fastest", "sky"], ["median", "blue"], ["slowest", "orange"]].map(([label, colour]) => ({ label, stroke: () => css(colour), width: 1.5, points: { show: false } }));
    data = [at(v => v[v.length - 1]), at(v => v[v.length >> 1]), at(v => v[0])];
  }
  for (const one of series) one.value = (_, v) => v == null ? "" : count(v);
  $("speed-note").textContent = (each ? "of each worker" : `of ${ranks.length} workers`) + ", at each moment";
  chart("speed", $("speed"), { height: 180, signature: series.map(s => s.label).join() + css("paper"), yValues: count,
    xValues: (_, vs) => vs.map(span), series: [{ label: "since the start", value: (_, v) => v == null ? "" : span(v) }, ...series] }, [x, ...data]);
}

function drawWorkers(speeds) {
  const look = lastOf(run.workers);
  $("workers-card").hidden = !look;
  if (!look) return;
  const used = Object.keys(PHASES).filter(p => look.list.some(w => w[p] > 0));
  $("legend").replaceChildren("time goes into ", ...used.map(p => {
    const box = el("i");
    box.style.background = `var(--${PHASES[p]})`;
    return el("span", { class: "key" }, box, PHASE_NAMES[p]);
  }));
  const now = new Map(), recent = speeds.slice(-6);
  for (const w of look.list) {
    const values = recent.map(s => s.of.get(w.rank)).filter(v => v != null), busy = used.reduce((sum, p) => sum + w[p], 0);
    now.set(w.rank, run.end ? (busy ? w.rows / busy : null) : values.length ? values.reduce((a, b) => a + b) / values.length : null);
  }
  const typical = median([...now.values()].filter(v => v)), from = run.begin.t, to = Math.max(look.t, from + 1);
  const before = run.workers[Math.max(0, run.workers.length - 8)];
  const head = el("tr", {}, ...[["worker"], ["state"], ["since the start", "wide"], ["where its time goes"], [run.end ? "mean rows/s" : "rows/s now", "n"], ["staleness", "n wide"], ["processors", "n wide"], ["memory", "n wide"]]
    .map(([name, kind]) => el("th", kind ? { class: kind } : {}, name)));
  const rows = look.list.map(w => {
    const total = used.reduce((sum, p) => sum + w[p], 0) || 1, shares = el("div", { class: "shares" });
    for (const p of used) {
      const part = el("i", { title: `${PHASE_NAMES[p]} ${(100 * w[p] / total).toFixed(0)} %, ${span(w[p])}` });
      part.style.width = (100 * w[p] / total) + "%";
      part.style.background = `var(--${PHASES[p]})`;
      shares.append(part);
    }
    const ns = "http://www.w3.org/2000/svg", strip = document.createElementNS(ns, "svg");
    strip.setAttribute("class", "strip"); strip.setAttribute("viewBox", "0 0 100 10"); strip.setAttribute("preserveAspectRatio", "none");
    for (const s of run.states.get(w.rank) || []) {
      const box = document.createElementNS(ns, "rect"), title = document.createElementNS(ns, "title");
      box.setAttribute("x", 100 * (s.from - from) / (to - from)); box.setAttribute("width", Math.max(.6, 100 * (s.to - s.from) / (to - from)));
      box.setAttribute("y", s.state === "lost" ? 0 : 2); box.setAttribute("height", s.state === "lost" ? 10 : 6);
      box.style.fill = `var(--${STATES[s.state]})`; title.textContent = `${s.state} for ${span(s.to - s.from)}`;
      box.append(title); strip.append(box);
    }
    const speed = now.get(w.rank), slow = ["training", "finished"].includes(stateOf(w)) && typical && speed != null && speed < SLOW * typical;
    const past = before.list.find(b => b.rank === w.rank), cpu = past && look.t > before.t && w.cpu >= past.cpu ? (w.cpu - past.cpu) / (look.t - before.t) : null;
    return el("tr", {}, el("td", {}, `${w.rank} · ${w.host || "–"}`), el("td", {}, stateOf(w) + (w.retries ? ` (attempt ${w.retries + 1})` : "")),
      el("td", { class: "wide" }, strip), el("td", {}, shares), el("td", slow ? { class: "n slow", title: "slower than most workers" } : { class: "n" }, (slow ? "▼ " : "") + count(speed)),
      el("td", { class: "n wide" }, short(w.staleness, 2)), el("td", { class: "n wide" }, cpu == null || run.end ? "–" : cpu.toFixed(1)), el("td", { class: "n wide" }, bytes(w.memory || null)));
  });
  $("workers").replaceChildren(head, ...rows);
}

function drawServers() {
  const look = lastOf(run.workers), servers = look ? look.servers : [];
  $("servers-card").hidden = !servers.length;
  if (!servers.length) return;
  const before = run.workers[Math.max(0, run.workers.length - 8)], seconds = look.t - before.t;
  const rows = servers.some(s => s[4] > 0);
  const rate = (i, part) => !run.end && seconds > 0 && before.servers[i] && servers[i][part] >= before.servers[i][part]
    ? bytes((servers[i][part] - before.servers[i][part]) / seconds) + "/s" : "–";
  const heads = [["server"], ["in", "n"], ["in now", "n wide"], ["out", "n"], ["out now", "n wide"], ["memory", "n"],
    ...(rows ? [["rows of tables", "n"], ["staleness", "n wide"]] : []), ["requests now", "n wide"]];
  $("servers").replaceChildren(el("tr", {}, ...heads.map(([name, kind]) => el("th", kind ? { class: kind } : {}, name))),
    ...servers.map(([host, received, sent, memory, held, stale, busy], i) => el("tr", {}, el("td", {}, `${i} · ${host}`),
      el("td", { class: "n" }, bytes(received)), el("td", { class: "n wide" }, rate(i, 1)), el("td", { class: "n" }, bytes(sent)),
      el("td", { class: "n wide" }, rate(i, 2)), el("td", { class: "n" }, bytes(memory)),
      ...(rows ? [el("td", { class: "n" }, count(held)), el("td", { class: "n wide" }, short(stale, 2))] : []),
      el("td", { class: "n wide" }, run.end ? "–" : String(busy)))));
}

const FULL = 90;           // percent of memory from which a host is marked
function drawHosts() {
  const look = lastOf(run.workers), hosts = look ? look.hosts : [];
  $("hosts-card").hidden = !hosts.length;
  if (!hosts.length) return;
  const gpus = hosts.some(h => h[3].length);
  const meter = (share, mark = "") => {
    const fill = el("i");
    fill.style.width = share + "%";
    return el("td", mark ? { class: "slow", title: mark } : {}, el("div", { class: "load" }, el("div", { class: "bar" }, fill), `${mark ? "▲ " : ""}${share.toFixed(0)} %`));
  };
  const several = (shares, mark) => !shares.length ? el("td", {}, "–") : shares.length === 1 ? meter(shares[0], mark)
    : el("td", mark ? { class: "slow", title: mark } : {}, shares.map(s => s.toFixed(0)).join(" · ") + " %");
  const fullOf = (shares, advice) => shares.some(s => s >= FULL) ? `nearly full: ${advice}` : "";
  $("hosts").replaceChildren(el("tr", {}, ...["host", "processors", "memory", ...(gpus ? ["GPUs", "GPU memory"] : [])].map(name => el("th", {}, name))),
    ...hosts.map(([host, cpu, memory, use, used]) => el("tr", {}, el("td", {}, host), meter(cpu),
      meter(memory, fullOf([memory], "a smaller memory_budget_mb, or fewer workers per host")),
      ...(gpus ? [several(use, ""), several(used, "")] : []))));
}
function drawLog() {
  $("log-card").hidden = !run.lines.length;
  if (!run.lines.length) return;
  const wanted = $("log-filter").value.trim().toLowerCase(), rank = /^(rank )?\d+$/.test(wanted) ? +wanted.replace("rank ", "") : null;
  const found = run.lines.filter(l => !wanted || (rank != null ? l.rank === rank : l.text.toLowerCase().includes(wanted)));
  const host = $("log"), below = host.scrollHeight - host.scrollTop - host.clientHeight < 30;
  $("log-note").textContent = wanted ? `${found.length} of the last ${run.lines.length}` : `the last ${run.lines.length}`;
  const text = found.map(l => `${new Date(1000 * l.t).toLocaleTimeString()}  rank ${l.rank}  ${l.text}`).join("\n");
  if (host.textContent !== text) host.textContent = text;
  if (below) host.scrollTop = host.scrollHeight;  // the newest stay in sight, unless the reader has scrolled up
}

let shownSettings = null;
function drawSettings() {
  if (shownSettings === run) return;
  shownSettings = run;
  const text = v => v === null ? "none" : typeof v === "object" ? JSON.stringify(v) : String(v);
  $("settings").replaceChildren(...Object.entries((run.begin || run.search).parameters).map(([name, value]) =>
    el("tr", {}, el("td", {}, name), el("td", {}, text(value)))));
}

// ---- runs, and what comes from the driver

function label(r) {
  const when = r.began ? new Date(1000 * r.began).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }) : r.run;
  const metrics = r.metrics || {}, loss = metrics.val_loss ?? metrics.loss;
  const mark = { running: "▶", done: "✓", failed: "✗" }[r.state];
  if (r.metric) return `${mark} search for ${r.metric} · ${r.trials} trials · ${when}`;
  return `${mark} ${r.model || "?"} · ${when}` + (loss == null ? "" : ` · loss ${short(loss, 3)}`);
}
async function ask(path) {
  const answer = await fetch(url(path), { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
async function listRuns() {
  runs = await ask("api/runs");
  if (runs.length && (chosen === null || followNewest && runs[0].run !== chosen)) await choose(runs[0].run, true);
  $("runs").replaceChildren(...runs.map(r => el("option", { value: r.run }, label(r))));
  if (chosen) $("runs").value = chosen;
  if (!runs.length) $("runs").replaceChildren(el("option", {}, "none yet"));
}
let answers = true;  // the driver
let early = null;  // records that come while a run is being loaded
async function choose(id, newest = false) {
  chosen = id;
  followNewest = newest || (runs.length > 0 && runs[0].run === id);
  const mine = early = [];
  const records = await ask("api/run/" + encodeURIComponent(id));
  if (early !== mine) return;  // the run was chosen again meanwhile
  for (const { plot } of Object.values(charts)) plot.destroy();
  charts = {};
  $("curves").replaceChildren();
  run = newRun(id);
  const known = new Set(records.map(r => JSON.stringify(r)));
  for (const record of [...records, ...early.filter(r => !known.has(JSON.stringify(r)))]) take(record);
  early = null;
  $("runs").value = id;
  draw();
}
function connect() {
  const stream = new EventSource(url("api/events"));
  stream.onopen = async () => {
    answers = true; drawLink();
    try { await listRuns(); if (chosen) await choose(chosen, followNewest); } catch (error) { stream.onerror(); }
  };
  stream.onerror = () => {
    answers = false; drawLink();
    if (stream.readyState === EventSource.CLOSED) { stream.close(); setTimeout(connect, 3000); }
  };
  stream.onmessage = event => {
    const told = JSON.parse(event.data), kind = told.record.kind;
    if (told.run === chosen && run && run.id === chosen) {
      if (early) early.push(told.record); else { take(told.record); drawSoon(); }
    }
    if (["begin", "search", "rung", "epoch", "end", "fail"].includes(kind)) listRuns().catch(() => {});
  };
}
function move(by) {
  const at = runs.findIndex(r => r.run === chosen) + by;
  if (at >= 0 && at < runs.length) choose(runs[at].run).catch(() => {});
}
function switchTheme() {
  const root = document.documentElement, dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
  for (const { plot } of Object.values(charts)) plot.destroy();
  charts = {};
  draw();
}
$("runs").addEventListener("change", event => choose(event.target.value).catch(() => {}));
$("log-filter").addEventListener("input", () => { if (run) drawLog(); });
$("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
  ({ j: () => move(1), k: () => move(-1), d: switchTheme }[event.key] || (() => {}))();
});
new ResizeObserver(drawSoon).observe($("main"));
setInterval(() => { if (run && !run.end) drawSoon(); }, 2000);
connect();
