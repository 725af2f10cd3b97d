"use strict";
// A search of hyper-parameters: its trials and their charts. Helpers are those of page.js.
const SHOWN_TRIALS = 200;  // rows of the table
const STATE_NAMES = { running: "training", waiting: "compared", complete: "trained to the end", failed: "failed", stopped: "stopped" };

function takeTrial(run, record) {
  if (!run.trials.has(record.trial)) run.trials.set(record.trial, { number: record.trial, params: {}, state: "running", epochs: 0, points: new Map(), error: "" });
  const trial = run.trials.get(record.trial);
  if (record.kind === "trial") {
    trial.params = record.params;
    trial.state = "running";
    trial.first = trial.first ?? record.begin;  // a copy has its parent's epochs behind it
    return;
  }
  if (record.kind === "point") {
    run.search.trained = (run.search.trained || 0) + 1;
    run.search.last = record.t;
  }
  const value = record.metrics[run.search.metric], epochs = record.kind === "point" ? record.epoch + 1 : record.epochs;
  if (typeof value === "number") {
    trial.points.set(epochs, value);
    trial.epochs = Math.max(trial.epochs, epochs);
  }
  if (record.kind === "rung") {
    trial.state = record.state;
    trial.error = record.error;
    run.importances = record.importances || {};
  }
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const valueOf = trial => trial.points.get(trial.epochs);
function ranked(run) {  // the best first; by the last epoch of each
  const sign = run.search.maximize ? -1 : 1;
  return [...run.trials.values()].filter(t => t.state !== "failed" && valueOf(t) != null).sort((a, b) => sign * (valueOf(a) - valueOf(b)));
}
const named = trial => `trial ${trial.number}: ${short(valueOf(trial))} after ${trial.epochs} epochs\n` +
  Object.entries(trial.params).map(([n, v]) => `${n} = ${typeof v === "number" ? short(v) : v}`).join("\n");

// A scale: value -> 0..1, and the values to write beside it. Numbers that spread evenly over their logarithm
// get a logarithmic one; far outliers do not set a metric's range.
function scaleOf(values, { metric = false, maximize = false, linear = metric } = {}) {
  const numbers = values.filter(v => typeof v === "number" && isFinite(v));
  if (!linear && (values.some(v => typeof v !== "number") || !numbers.length)) {
    const names = [...new Set(values.map(String))].sort();
    const at = v => names.length < 2 ? .5 : names.indexOf(String(v)) / (names.length - 1);
    return { at, ticks: names.map(n => [n, at(n)]) };
  }
  const sorted = [...numbers].sort((a, b) => a - b), pick = q => sorted[Math.round(q * (sorted.length - 1))];
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (metric && sorted.length > 8) {
    const span = pick(.9) - pick(.1);
    if (maximize) low = Math.max(low, pick(.1) - span); else high = Math.min(high, pick(.9) + span);
  }
  const off = f => Math.abs((f(pick(.5)) - f(low)) / (f(high) - f(low)) - .5);
  const log = !linear && low > 0 && high / low > 10 && off(Math.log) < off(v => v), f = log ? Math.log : v => v;
  const from = f(low), to = f(high), at = v => to === from ? .5 : Math.min(1, Math.max(0, (f(v) - from) / (to - from)));
  if (to === from) return { at, ticks: [[short(low, 3), .5]] };
  if (log) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const v of high / low < 1e4 ? [10 ** e, 3 * 10 ** e] : [10 ** e]) if (v >= low && v <= high) ticks.push([short(v, 3), at(v)]);
    return { at, log, ticks };
  }
  const step = [1, 2, 2.5, 5, 10].map(m => m * 10 ** Math.floor(Math.log10((high - low) / 4))).find(s => (high - low) / s <= 5);
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step) ticks.push([short(v, 4), at(v)]);
  return { at, ticks };
}

function drawSearch(run) {
  const best = ranked(run);
  drawSearchHeadline(run, best);
  drawLearning(run, best);
  drawImportances(run);
  drawScatter(run, best);
  drawParallel(run, best);
  drawTrials(run, best);
}

// Seconds until the searcher's end at the present speed, or until the time limit: whichever comes first.
function timeLeft(search, epochs, now) {
  const { expected_epochs: expected, timeout_s: limit } = search.parameters, seconds = search.last - search.t;
  const byEpochs = expected && search.trained && seconds > 0 ? seconds * Math.max(0, expected - epochs) / search.trained : null;
  const byLimit = limit ? Math.max(0, search.t + limit - now) : null;
  return byEpochs == null ? byLimit : byLimit == null ? byEpochs : Math.min(byEpochs, byLimit);
}

function drawSearchHeadline(run, best) {
  const { search, end } = run, trials = [...run.trials.values()];
  const now = end ? end.t : Math.max(search.t, Date.now() / 1000), by = {};
  for (const t of trials) by[t.state] = (by[t.state] || 0) + 1;
  const epochs = trials.reduce((sum, t) => sum + Math.max(0, t.epochs - (t.first || 0)), 0), most = search.parameters.max_epochs * trials.length;
  const left = end ? null : timeLeft(search, epochs, now), time = left == null ? `for ${span(now - search.t)}` : `about ${span(left)} left`;
  const cards = [
    card(end ? (end.kind === "fail" ? "Failed" : "Done") : "Searching", `${trials.length} trials`, end ? `took ${span(end.t - search.t)}` : `${by.running || 0} in training, ${time}`,
      end || !search.parameters.expected_epochs ? null : Math.min(1, epochs / search.parameters.expected_epochs)),
    card(`Best ${search.metric}`, best.length ? short(valueOf(best[0])) : "–", best.length ? `trial ${best[0].number}, ${best[0].epochs} epochs` : "no trial was compared yet"),
    card("Epochs trained", count(epochs), (search.parameters.expected_epochs && !end ? `of about ${count(search.parameters.expected_epochs)}; ` : "") + (most ? `${Math.round(100 * epochs / most)} % of all trials to the end` : "")),
    card("To the end", String(by.complete || 0), `${by.waiting || 0} ended earlier`),
  ];
  if (by.failed) cards.push(card("Failed trials", String(by.failed), "scored worst, and replaced"));
  $("headline").replaceChildren(...cards);
  $("error").hidden = !(end && end.kind === "fail");
  $("error").textContent = end && end.error || "";
}

function frame(host, height, left, bottom, x, y, labels) {
  const width = Math.max(200, host.clientWidth), inner = { x: left, y: 8, w: width - left - 12, h: height - bottom - 8 };
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": labels.join(" over ") });
  for (const [text, at] of y.ticks) {
    const v = inner.y + inner.h * (1 - at);
    plot.append(svg("path", { class: "frame", d: `M${left} ${v}h${inner.w}` }), svg("text", { x: left - 6, y: v + 4, "text-anchor": "end" }, text));
  }
  let free = -1e9;
  for (const [text, at] of x.ticks) {
    const v = inner.x + inner.w * at, wide = 7 * text.length;
    if (v - wide / 2 < free) continue;
    free = v + wide / 2 + 4;
    plot.append(svg("text", { x: v, y: inner.y + inner.h + 16, "text-anchor": at > .97 && wide > 20 ? "end" : "middle" }, text));
  }
  plot.append(svg("text", { x: inner.x + inner.w / 2, y: height - 3, "text-anchor": "middle" }, labels[1]));
  plot.at = (u, v) => [inner.x + inner.w * x.at(u), inner.y + inner.h * (1 - y.at(v))];
  return plot;
}
const line = points => "M" + points.map(p => p.map(v => v.toFixed(1)).join(" ")).join("L");

function drawLearning(run, best) {
  const host = $("learning"), { metric, maximize } = run.search, drawn = [...run.trials.values()].filter(t => t.points.size);
  if (!drawn.length) return host.replaceChildren(el("p", { class: "hint" }, "No trial has ended an epoch yet."));
  const y = scaleOf(drawn.flatMap(t => [...t.points.values()]), { metric: true, maximize });
  const x = scaleOf([0, ...drawn.map(t => t.epochs)], { linear: true });
  const plot = frame(host, 260, 52, 38, x, y, [metric, "epochs"]), order = [...drawn].sort((a, b) => (a === best[0]) - (b === best[0]));
  for (const t of order) {
    const points = [...t.points].sort((a, b) => a[0] - b[0]).map(([e, v]) => plot.at(e, v)), kind = t === best[0] ? "best" : t.state === "running" ? "running" : "";
    if (points.length > 1) plot.append(svg("path", { class: "trial " + kind, "data-trial": t.number, d: line(points) }, svg("title", {}, named(t))));
    const [cx, cy] = points[points.length - 1];
    plot.append(svg("circle", { class: "trial " + (kind === "best" ? kind : t.state === "complete" || kind ? "" : "short"), "data-trial": t.number, cx, cy, r: kind === "best" ? 5 : 3 }, svg("title", {}, named(t))));
  }
  $("learning-note").textContent = `${metric}, ${maximize ? "higher" : "lower"} is better; best in orange` + (run.end ? "" : ", in training in blue");
  host.replaceChildren(plot);
}

function drawImportances(run) {
  const found = Object.entries(run.importances).sort((a, b) => b[1] - a[1]), host = $("importance");
  if (!found.length) return host.replaceChildren(el("p", { class: "hint" }, "Known when some ten trials were compared."));
  host.replaceChildren(...found.slice(0, 12).map(([name, share]) => {
    const fill = el("i");
    fill.style.width = (100 * share).toFixed(1) + "%";
    return el("div", { class: "share" }, el("span", {}, name), el("div", { class: "bar" }, fill), el("b", {}, `${Math.round(100 * share)} %`));
  }));
}

function namesOf(run, best) {
  const names = [...new Set(best.flatMap(t => Object.keys(t.params)))], share = n => run.importances[n] ?? -1;
  return names.sort((a, b) => share(b) - share(a));
}

function drawScatter(run, best) {
  const host = $("scatter"), names = namesOf(run, best).slice(0, 12), { metric, maximize } = run.search;
  if (best.length < 2) return host.replaceChildren(el("p", { class: "hint" }, "Two trials must have been compared."));
  for (const old of [...host.children]) if (!names.includes(old.dataset.name)) old.remove();
  for (const name of names) if (![...host.children].some(c => c.dataset.name === name)) host.append(el("div", { "data-name": name }));
  const y = scaleOf(best.map(valueOf), { metric: true, maximize }), longest = Math.max(...best.map(t => t.epochs));
  for (const name of names) {
    const place = [...host.children].find(c => c.dataset.name === name), has = best.filter(t => name in t.params), x = scaleOf(has.map(t => t.params[name]));
    const plot = frame(place, 190, 52, 38, x, y, [metric, name + (x.log ? " (log)" : "")]);
    for (const t of [...has].reverse()) {
      const [cx, cy] = plot.at(t.params[name], valueOf(t));
      plot.append(svg("circle", { class: "trial " + (t === best[0] ? "best" : t.epochs < longest ? "short" : ""), "data-trial": t.number, cx, cy, r: t === best[0] ? 5 : 3.5 }, svg("title", {}, named(t))));
    }
    place.replaceChildren(plot);
  }
  $("scatter-note").textContent = `${metric}; filled: trained for ${longest} epochs, hollow: fewer`;
}

function drawParallel(run, best) {
  const host = $("parallel"), names = namesOf(run, best).slice(0, 10), { metric, maximize } = run.search;
  if (best.length < 2) return host.replaceChildren(el("p", { class: "hint" }, "Two trials must have been compared."));
  const width = Math.max(host.clientWidth, 110 * (names.length + 1)), height = 250, top = 26, inner = height - top - 14;
  const axes = [...names.map(n => [n, scaleOf(best.filter(t => n in t.params).map(t => t.params[n])), t => t.params[n]]),
    [metric, scaleOf(best.map(valueOf), { metric: true, maximize }), valueOf]];
  const at = i => 60 + (width - 120) * (axes.length < 2 ? .5 : i / (axes.length - 1)), plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "parallel coordinates" });
  plot.style.minWidth = width + "px";
  const good = new Set(best.slice(0, Math.max(1, Math.round(best.length / 10))));
  for (const t of [...best].reverse()) {
    const points = axes.flatMap(([, scale, get], i) => { const v = get(t); return v === undefined ? [] : [[at(i), top + inner * (1 - scale.at(v))]]; });
    plot.append(svg("path", { class: "trial " + (t === best[0] ? "best" : good.has(t) ? "good" : ""), "data-trial": t.number, d: line(points) }, svg("title", {}, named(t))));
  }
  axes.forEach(([name, scale], i) => {
    plot.append(svg("path", { class: "frame", style: "stroke: var(--ink-2)", d: `M${at(i)} ${top}v${inner}` }), svg("text", { x: at(i), y: 14, "text-anchor": "middle", style: "fill: var(--ink); font-weight: 600" }, name + (scale.log ? " (log)" : "")));
    for (const [text, v] of scale.ticks) plot.append(svg("text", { x: at(i) + (i === axes.length - 1 ? 7 : -7), y: top + inner * (1 - v) + 4, "text-anchor": i === axes.length - 1 ? "start" : "end" }, text));
  });
  host.replaceChildren(plot);
}

function drawTrials(run, best) {
  const rest = [...run.trials.values()].filter(t => !best.includes(t)), all = [...best, ...rest], names = [...new Set(all.flatMap(t => Object.keys(t.params)))];
  const head = el("tr", {}, el("th", {}, "trial"), el("th", {}, "state"), el("th", { class: "n" }, "epochs"), el("th", { class: "n" }, run.search.metric), ...names.map(n => el("th", { class: "n" }, n)));
  const rows = all.slice(0, SHOWN_TRIALS).map(t => el("tr", { "data-trial": t.number }, el("td", {}, String(t.number)),
    el("td", t.state === "failed" ? { class: "failed", title: t.error } : {}, (t.state === "failed" ? "✗ " : "") + STATE_NAMES[t.state] + (t.error ? `: ${t.error.slice(0, 80)}` : "")),
    el("td", { class: "n" }, String(t.epochs)), el("td", { class: "n" }, short(valueOf(t))),
    ...names.map(n => el("td", { class: "n" }, n in t.params ? typeof t.params[n] === "number" ? short(t.params[n]) : String(t.params[n]) : "–"))));
  $("trials").replaceChildren(head, ...rows);
  $("trials-note").textContent = "best first" + (all.length > SHOWN_TRIALS ? `; the first ${SHOWN_TRIALS} of ${all.length}` : "");
}

// The trial under the pointer is marked in every chart and in the table.
for (const [happens, marked] of [["mouseover", true], ["mouseout", false]])
  document.addEventListener(happens, event => {
    const of = event.target.closest && event.target.closest("[data-trial]");
    if (of) for (const each of document.querySelectorAll(`[data-trial="${of.dataset.trial}"]`)) each.classList.toggle("hot", marked);
  });
