// Tables and lists with a filter: costs by place, memory, events.

const GROUPS = [
  ["reads", "Reads: the program waited for a value"], ["fallbacks", "Fallbacks: operators that ran by themselves"], ["compiles", "Compiles"], ["slow compiles", "Compiles that took long"], ["takeovers", "Programs from the background that took over"], ["cuts", "Steps that were cut because enough was pending"], ["collectives", "Collectives: what was not done while something else was"],
  ["replays", "Replays (tarry.compile)"], ["reference path", "Steps on the reference path"], ["store", "Programs on disk"], ["failures", "Failures"], ["other", "Other"],
];

function costsView(run) {
  const body = h("div", {});
  const show = (needle) => {
    const rows = run.costs.filter((cost) => !needle || [cost.what, cost.place, cost.library, cost.reason, cost.kind, cost.module].some((text) => text.toLowerCase().includes(needle)));
    body.replaceChildren(...GROUPS.map(([group, title]) => costTable(title, rows.filter((cost) => cost.group === group))).filter(Boolean));
    if (!rows.length) body.replaceChildren(h("p.soft", {}, needle ? "Nothing fits the filter." : "Nothing was read, nothing fell back, nothing was compiled."));
  };
  show("");
  return h("div", {}, h("div.tools", {}, search("Filter: file, operator, reason", show)), body);
}

function costTable(title, rows) {
  if (!rows.length) return null;
  const total = rows.reduce((sum, cost) => sum + cost.seconds, 0);
  return h("section.panel", { "data-group": rows[0].group },
    h("h2", {}, title, " ", h("span.soft", {}, `${plural(rows.reduce((sum, cost) => sum + cost.count, 0), "time")}, ${seconds(total)}`)),
    table([
      ["total", "number", (cost) => seconds(cost.seconds)],
      ["times", "number", (cost) => count(cost.count)],
      ["each", "number", (cost) => seconds(cost.seconds / cost.count)],
      ["where", "wide", (cost) => [place(cost.place), cost.library ? h("div.soft", {}, "in ", place(cost.library)) : null, cost.module ? h("div.soft.mono", {}, cost.module) : null]],
      ["what", "mono", (cost) => (cost.group === "replays" || cost.group === "store" ? `${cost.kind} ${cost.what}` : cost.what)],
      ["why, and what to do", "wide", (cost) => [cost.reason, cost.reasons > 1 ? h("span.soft", {}, ` (and ${count(cost.reasons - 1)} other reasons)`) : null, cost.remedy ? h("div.soft", {}, "Instead: ", cost.remedy) : null]],
    ], rows.slice(0, 300)),
    rows.length > 300 ? h("p.soft", {}, `and ${count(rows.length - 300)} more: use the filter`) : null);
}

function eventsView(run) {
  const all = run.events.rows;
  const kinds = [...new Set(all.map((row) => row[1]))].sort();
  const choice = h("select", { "aria-label": "Kind of event", onchange: () => show() }, h("option", { value: "" }, "all kinds"), kinds.map((kind) => h("option", { value: kind }, kind)));
  let needle = "", rows = all;
  const found = h("span.soft", {}), detail = h("div", { id: "event" });
  const cell = (width, ...content) => h("span.cell", { style: `width:${width}` }, content);
  const list = new List({ fixed: true, attributes: { id: "events", style: "height:560px" }, render: (k) => {
    const [time, kind, cost, where, text] = rows[k];
    return h("div.row", { style: "cursor:pointer", onclick: () => detail.replaceChildren(eventDetail(run, rows[k])) },
      cell("90px", seconds(time / 1e6)), cell("150px", h("strong", {}, kind)), cell("80px", cost ? seconds(cost / 1e6) : ""), cell("260px", where ? place(where) : ""), h("span.cell", { style: "flex:1 1 0" }, text));
  } });
  const show = () => {
    rows = all.filter((row) => (!choice.value || row[1] === choice.value) && (!needle || row[1].includes(needle) || row[3].toLowerCase().includes(needle) || row[4].toLowerCase().includes(needle)));
    found.textContent = `${plural(rows.length, "event")}; click one for all of it`;
    list.element.scrollTop = 0;
    list.show(rows.length);
  };
  show();
  return h("div", {}, h("div.tools", {}, choice, search("Filter: file, text", (text) => { needle = text; show(); }), found),
    run.events.left_out ? h("p.note", {}, `${count(run.events.left_out)} events that come with each step are left out of this list; the file of events has them.`) : null,
    list.element, detail);
}

function eventDetail(run, [time, kind, cost, where, text, library, remedy]) {
  return h("section.panel", { style: "margin-top:12px" }, h("h2", {}, kind, h("span.soft", {}, ` at ${seconds(time / 1e6)}${cost ? `, ${seconds(cost / 1e6)}` : ""}`)),
    where ? h("p", {}, place(where, where), library ? [" in ", place(library, library)] : null) : null, h("p", {}, text),
    remedy || run.remedies[kind] ? h("p.soft", {}, "Instead: ", remedy || run.remedies[kind]) : null);
}

function memoryView(run) {
  const graphs = run.graphs.filter((graph) => graph.stages.length);
  if (!graphs.length) return h("p.soft", {}, "No graph was recorded.");
  const body = h("div", {});
  const largest = graphs.reduce((best, graph) => (graph.operators > best.operators ? graph : best));
  const choice = h("select", { "aria-label": "Graph", onchange: () => show() }, graphs.map((graph) => h("option", { value: graph.graph, selected: graph === largest }, graphName(graph))));
  const stage = h("select", { "aria-label": "Stage", onchange: () => show() });
  const show = async () => {
    const graph = graphs.find((each) => each.graph === choice.value);
    const wanted = graph.stages.includes(stage.value) ? stage.value : graph.stages.at(-1);
    stage.replaceChildren(...graph.stages.map((name) => h("option", { value: name, selected: name === wanted }, name)));
    const detail = await graphDetail(run, graph);
    if (choice.value === graph.graph && stage.value === wanted) body.replaceChildren(memoryOf(detail.stages[wanted]));
  };
  show();
  return h("div", {}, h("div.tools", {}, choice, stage), body);
}

function memoryOf(stage) {
  const found = stage.memory;
  const holder = h("div.plot", { "data-plot": "memory" });
  let plot = null;
  whenShown(holder, () => {
    if (plot) plot.destroy();
    const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 } };
    plot = new uPlot({
      width: holder.clientWidth, height: 220, scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
      series: [{ label: "node" }, { label: "alive", stroke: color("accent"), fill: `${color("accent")}33`, value: (_, v) => (v == null ? "" : bytes(v)), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
      axes: [axis, { ...axis, size: 70, values: (_, values) => values.map(bytes) }],
    }, [found.positions, found.bytes], holder);
  });
  const where = (row) => (row.node < 0 ? h("span.soft", {}, "held by the program before the step") : [place(stage.sites[stage.site[row.node]]), stage.module[row.node] >= 0 ? h("div.soft.mono", {}, stage.modules[stage.module[row.node]]) : null]);
  return h("div", {},
    h("section.panel", {}, h("h2", {}, `Peak: ${bytes(found.peak)} `, h("span.soft", {}, `at node ${count(found.peak_at)}; ${bytes(found.inputs)} of it are inputs`)), holder,
      h("p.soft", {}, "Computed from the graph: what its nodes need one by one, each buffer freed after its last use. A compiled program that fuses operators needs less.")),
    h("section.panel", { id: "alive" }, h("h2", {}, "Alive at the peak"), table([
      ["size", "number", (row) => bytes(row.bytes)],
      ["of the peak", "number", (row) => percent(row.bytes, found.peak)],
      ["what", "mono", (row) => row.what],
      ["made at", "wide", where],
      ["alive from, to node", "number", (row) => (row.node < 0 ? "" : `${count(row.node)} – ${row.last >= stage.op.length ? "end" : count(row.last)}`)],
    ], found.alive), found.more ? h("p.soft", {}, `and ${bytes(found.more)} in smaller ones`) : null));
}
