// The verdict, what to change first, time per step.

function overview(run) {
  const verdict = run.verdict;
  return h("div", {},
    cards(run, verdict),
    verdict.notes.map((note) => h("p.note", {}, note)),
    h("section.panel", { id: "advice" }, h("h2", {}, "What to change first"), verdict.advice.length
      ? verdict.advice.slice(0, 8).map((advice) => adviceRow(advice, verdict.seconds))
      : h("p.soft", {}, "Nothing stands out: no line has cost more than a fiftieth of the run.")),
    h("section.panel", {}, h("h2", {}, "Where the time of the steps went"), shares(run)),
    h("section.panel", {}, h("h2", {}, "Time per step"), stepPlot([run])),
    about(run),
  );
}

function cards(run, verdict) {
  const kinds = { warm: "good", cold: "bad", reference: "fair", empty: "fair" };
  const speed = verdict.before && verdict.after ? `${seconds(verdict.before)} without a program: ${(verdict.before / verdict.after).toFixed(1)} times as long` : verdict.after ? "by programs" : "without a program";
  const card = (label, figure, detail) => h("div.card", {}, h("div.label", {}, label), h("div.figure", {}, figure), h("div.detail", {}, detail));
  const lost = (group) => `${percent(verdict.lost[group], verdict.seconds)} of the run`;
  return h("div.cards", { id: "verdict" },
    card("State", h(`span.${kinds[verdict.state]}`, {}, verdict.state), verdict.state_reason),
    card("Steps", count(verdict.steps), `${count(verdict.compiled_steps)} by programs (${percent(verdict.compiled_steps, verdict.steps)}), in ${seconds(verdict.seconds)}`),
    card("Median step", seconds(verdict.after || verdict.before), `${speed}; the first took ${seconds(verdict.first)}`),
    card("Waited for compiles", seconds(verdict.lost.compiles), `${lost("compiles")}; ${seconds(verdict.background)} more in the background`),
    card("Waited for values", seconds(verdict.lost.reads), `${lost("reads")}, in reads such as .item()`),
    card("Fallbacks", seconds(verdict.lost.fallbacks), `${lost("fallbacks")}, in operators that run by themselves`),
  );
}

function adviceRow(advice, whole) {
  return h("div.advice", {},
    h("div.cost", { title: `${percent(advice.seconds, whole)} of the run` }, seconds(advice.seconds)),
    h("div.title", {}, advice.title),
    h("div", {}, advice.place ? place(advice.place) : null, advice.library ? h("span.soft", {}, " in ", place(advice.library)) : null),
    h("div.remedy", {}, advice.remedy || "see the events"),
  );
}

const PHASES = { record: "record (the program's own Python)", reference: "reference path", execute: "execute", compile: "compile, awaited", wait: "wait for the step before", fallback: "fallbacks", other: "other: data, reads, Python between steps" };

function shares(run) {
  const whole = Object.values(run.shares).reduce((sum, value) => sum + value, 0);
  const parts = Object.entries(run.shares).filter(([, value]) => value > 0);
  if (!parts.length) return h("p.soft", {}, "There are no steps.");
  return h("div", {},
    h("div.bar", {}, parts.map(([name, value]) => h("div", { title: `${PHASES[name]}: ${seconds(value)}`, style: `flex-grow:${value / whole};background:var(--${name})` }))),
    h("div.legend", {}, parts.map(([name, value]) => h("span", {}, h("i", { style: `background:var(--${name})` }), `${PHASES[name]}: ${seconds(value)} (${percent(value, whole)})`))),
  );
}

// One line for each run; of a single run, steps with and without a program apart.
function stepPlot(runs) {
  const holder = h("div.plot", { "data-plot": "steps" });
  const log = h("button.tool", { type: "button", "aria-pressed": "true", onclick: () => { log.setAttribute("aria-pressed", String(log.getAttribute("aria-pressed") !== "true")); draw(); } }, "Logarithmic");
  const single = runs.length === 1;
  const length = Math.max(...runs.map((run) => run.steps.index.length));
  if (!length) return h("p.soft", {}, "There are no steps.");
  const palette = ["execute", "compile", "fallback", "record", "wait", "read", "reference", "other"];
  const longest = runs.find((run) => run.steps.index.length === length);
  const data = [longest.steps.index.map((k) => k + 1)];
  const series = [{ label: "step" }];
  const value = (_, v) => (v == null ? "" : seconds(v / 1e3));
  const line = (label, tint, points) => ({ label, stroke: color(tint), value, width: points ? 0 : 1.2, points: { show: points, size: 4, fill: color(tint), stroke: color(tint) }, paths: points ? () => null : undefined });
  for (const [k, run] of runs.entries()) {
    const time = run.steps.seconds.map((us) => Math.max(us / 1e3, 1e-3));
    if (single) {
      data.push(time.map((ms, i) => (run.steps.compiled[i] ? ms : null)), time.map((ms, i) => (run.steps.compiled[i] ? null : ms)));
      series.push(line("by a program", "execute", true), line("without a program", "reference", true));
    } else {
      data.push(Array.from({ length }, (_, i) => time[i] ?? null));
      series.push(line(run.name, palette[k % palette.length], false));
    }
  }
  let plot = null;
  const draw = () => {
    if (plot) plot.destroy();
    const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 } };
    const ticks = (_, values) => values.map((v) => (v == null ? "" : seconds(v / 1e3)));
    plot = new uPlot({
      width: Math.max(280, holder.clientWidth), height: 240, series,
      scales: { x: { time: false }, y: { distr: log.getAttribute("aria-pressed") === "true" ? 3 : 1 } },
      axes: [{ ...axis, values: (_, values) => values.map((v) => (Number.isInteger(v) ? count(v) : "")) }, { ...axis, size: 70, values: ticks }],
      cursor: { drag: { x: true, y: false } }, legend: { live: true },
    }, data, holder);
    holder.dataset.points = String(length);
  };
  whenShown(holder, draw);
  return h("div", {}, h("div.tools", {}, log, h("span.soft", {}, "drag to zoom, double-click for all")), holder);
}

// Call `draw` when an element has a width, and again when that changes.
function whenShown(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth && Math.abs(element.clientWidth - width) > 4) {
      width = element.clientWidth;
      draw();
    }
  }).observe(element);
}

function about(run) {
  const header = run.header;
  const rows = [
    ["command", header.command.join(" ")], ["folder", header.folder], ["backend", run.end.backend ? `${run.end.backend} on ${run.end.device}` : "unknown: the run did not end"],
    ["versions", `tarry ${header.tarry}, torch ${header.torch}, Python ${header.python}`], ["started", new Date(header.started * 1000).toLocaleString()],
    ["process", `${header.pid}, rank ${header.rank} of ${header.world_size}`], ["events", run.path],
  ];
  const counters = Object.entries(run.counters).sort();
  return h("section.panel", {}, h("h2", {}, "About the run"),
    table([["", "", (row) => row[0]], ["", "mono", (row) => row[1]]], rows),
    counters.length ? h("details", {}, h("summary", {}, "All counters (tarry.metrics)"), table([["counter", "mono", (row) => row[0]], ["", "number", (row) => count(row[1])]], counters)) : null);
}
