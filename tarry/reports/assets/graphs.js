// The table of graphs, and one graph: as text at each stage, as a picture, beside the one before, what the backend made.

const graphName = (graph) => `${graph.graph.slice(0, 8)}${graph.graph.includes("-") ? graph.graph.slice(graph.graph.indexOf("-")) : ""}, ${plural(graph.operators, "operator")}`;

function graphDetail(run, graph) {
  const key = `graph-${state.data.runs.indexOf(run)}-${graph.graph}`;
  if (!state.details.has(key)) {
    state.details.set(key, unpack(key).then((detail) => {
      for (const [name, as] of Object.entries(detail.same)) detail.stages[name] = detail.stages[as];
      return detail;
    }));
  }
  return state.details.get(key);
}

function graphsView(run) {
  const detail = h("div", { id: "graph" });
  const holder = h("div", {});
  const origins = { compiled: "compiled", stored: "from disk", mixed: "partly from disk", recorded: "run as recorded", compiling: "being compiled" };
  let open = null;
  const show = (needle) => {
    const rows = run.graphs.filter((graph) => !needle || [graph.reason, graph.graph, graph.origin, ...(graph.lines || [])].some((text) => text.toLowerCase().includes(needle)));
    holder.replaceChildren(rows.length ? table([
      ["graph", "mono.nowrap", (graph) => graphName(graph).split(",")[0]],
      ["operators", "number", (graph) => count(graph.operators)],
      ["time", "number", (graph) => seconds(graph.seconds)],
      ["program", "nowrap", (graph) => [origins[graph.origin] || graph.origin, graph.background ? h("span.soft", {}, ", background") : null]],
      ["why it is new", "wide", (graph) => graph.reason || h("span.soft", {}, graph.previous ? "other operators than before" : "first of its kind")],
      ["from, to line", "wide", (graph) => (graph.lines ? [place(graph.lines[0]), h("br"), place(graph.lines[1])] : "")],
    ], rows.slice(0, 500), { choice: true, row: (graph) => ({ tabindex: 0, "data-graph": graph.graph, onclick: () => choose(graph), onkeydown: (event) => { if (event.key === "Enter") choose(graph); } }) }) : h("p.soft", {}, run.graphs.length ? "Nothing fits the filter." : "No graph was compiled while events were recorded."));
    mark();
  };
  const mark = () => { for (const row of holder.querySelectorAll("tr[data-graph]")) row.classList.toggle("open", open !== null && row.dataset.graph === open.graph); };
  const choose = async (graph) => {
    open = graph;
    mark();
    detail.replaceChildren(h("p.soft", {}, "unpacking …"));
    const found = await graphDetail(run, graph);
    if (open === graph) detail.replaceChildren(graphPanel(run, graph, found)); // another may have been chosen meanwhile
  };
  show("");
  const largest = run.graphs.reduce((best, graph) => (!best || graph.operators > best.operators ? graph : best), null);
  if (largest) choose(largest);
  return h("div", {}, h("div.tools", {}, search("Filter: reason, file, graph", show), h("span.soft", {}, plural(run.graphs.length, "graph"))), h("section.panel", { style: "max-height:340px;overflow:auto" }, holder), detail);
}

function graphPanel(run, graph, detail) {
  const body = h("div", {});
  const stage = h("select", { "aria-label": "Stage", onchange: () => show() }, graph.stages.map((name) => h("option", { value: name }, `${name}: ${plural(graph.nodes[name], "node")}`)));
  const views = { Text: () => stageText(detail.stages[stage.value]), Picture: () => new Picture(detail.stages[stage.value]).element };
  if (detail.difference) views.Difference = () => differenceView(run, graph, detail);
  if (detail.program) views["Backend's text"] = () => programText(detail.program);
  if (!graph.stages.length) { delete views.Text; delete views.Picture; }
  const names = Object.keys(views);
  let view = names[0];
  let pictured = false;
  const pick = (name) => {
    if (name === "Picture" && !pictured) { pictured = true; stage.value = graph.stages.at(-1); } // it has the clearest operators
    view = name;
    show();
  };
  const buttons = names.map((name) => h("button.tool", { type: "button", "data-view": name, onclick: () => pick(name) }, name));
  const show = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.view === view));
    stage.hidden = view !== "Text" && view !== "Picture";
    body.replaceChildren(view ? views[view]() : h("p.soft", {}, "Nothing was kept of this graph."));
    body.dataset.view = view || "";
  };
  show();
  return h("section.panel", {}, h("h2", {}, `Graph ${graphName(graph)}`), graph.reason ? h("p", {}, "New because: ", graph.reason) : null, graph.note ? h("p.note", {}, graph.note) : null, h("div.tools", {}, buttons, stage), body);
}

function nodeLine(stage, k) {
  const text = stage.text[k], op = stage.op[k], at = text.indexOf(` = ${op}(`);
  const content = at < 0 ? [text] : [text.slice(0, at + 3), h("span.op", {}, op), text.slice(at + 3 + op.length)];
  const site = stage.site[k], module = stage.module[k];
  return [content, h("span.at", {}, module >= 0 ? `${stage.modules[module]}  ` : "", site >= 0 ? place(stage.sites[site]) : "")];
}

function stageText(stage) {
  let rows = stage.text.map((_, k) => k);
  const found = h("span.soft", {});
  const list = new List({ count: rows.length, attributes: { id: "text" }, render: (i) => h("div.row", {}, h("span.no", {}, count(rows[i])), h("span", {}, nodeLine(stage, rows[i]))) });
  const filter = (needle) => {
    const sites = new Set(stage.sites.map((site, k) => (needle && site.toLowerCase().includes(needle) ? k : -2)));
    const modules = new Set(stage.modules.map((module, k) => (needle && module.toLowerCase().includes(needle) ? k : -2)));
    rows = stage.text.map((_, k) => k).filter((k) => !needle || stage.text[k].toLowerCase().includes(needle) || sites.has(stage.site[k]) || modules.has(stage.module[k]));
    found.textContent = needle ? plural(rows.length, "line") : "";
    list.element.scrollTop = 0;
    list.show(rows.length);
  };
  const inputs = stage.inputs.slice(0, 400).map(([value, type, size]) => `%${value}: ${type}  ${bytes(size)}`).join("\n");
  return h("div", {}, h("div.tools", {}, search("Find: operator, %value, file, module", filter), found),
    h("details", {}, h("summary.soft", {}, `${plural(stage.inputs.length, "input")}, ${plural(stage.outputs.length, "output")}`), h("pre", { style: "max-height:200px;overflow:auto" }, inputs, stage.inputs.length > 400 ? "\n…" : "")), list.element);
}

function programText(text) {
  const lines = text.split("\n");
  return new List({ count: lines.length, attributes: { id: "program" }, render: (k) => h("div.row", {}, h("span.no", {}, count(k + 1)), h("span", {}, lines[k])) }).element;
}

// Rows of two graphs: [old node or -1, new node or -1, changed], or the number of equal lines that are left out.
function differenceRows(hunks, before, after, all) {
  const around = 3, rows = [];
  const equal = (a, a_end, b, first, final) => {
    const amount = a_end - a;
    const from = first ? 0 : around, to = final ? 0 : around;
    if (all || amount <= from + to + 3) { for (let k = 0; k < amount; k++) rows.push([a + k, b + k, false]); return; }
    for (let k = 0; k < from; k++) rows.push([a + k, b + k, false]);
    rows.push(amount - from - to);
    for (let k = amount - to; k < amount; k++) rows.push([a + k, b + k, false]);
  };
  let a = 0, b = 0;
  for (const [i, i_end, j, j_end] of hunks) {
    equal(a, i, b, a === 0, false);
    for (let k = 0; k < Math.max(i_end - i, j_end - j); k++) rows.push([i + k < i_end ? i + k : -1, j + k < j_end ? j + k : -1, true]);
    a = i_end; b = j_end;
  }
  equal(a, before, b, a === 0, true);
  return rows;
}

function differenceView(run, graph, detail) {
  const body = h("div", {});
  const other = run.graphs.find((each) => each.graph === detail.difference.previous);
  const fill = async () => {
    const old = recordedOf(await graphDetail(run, other)), now = recordedOf(detail);
    const all = h("button.tool", { type: "button", "aria-pressed": "false", onclick: () => { all.setAttribute("aria-pressed", String(all.getAttribute("aria-pressed") !== "true")); draw(); } }, "Show equal lines");
    const { hunks, inputs } = detail.difference;
    let rows = [];
    const side = (stage, k, changed, kind) => h(`span.side${changed && k >= 0 ? `.${kind}` : ""}`, { title: k >= 0 ? stage.text[k] : "" }, k < 0 ? "" : [h("span.no", { style: "display:inline-block;width:60px" }, count(k)), nodeLine(stage, k)]);
    const list = new List({ fixed: true, attributes: { id: "difference" }, render: (k) => (typeof rows[k] === "number" ? h("div.row.gap", {}, h("span.no", {}), `⋯ ${plural(rows[k], "equal line")}`) : h("div.row", {}, side(old, rows[k][0], rows[k][2], "removed"), side(now, rows[k][1], rows[k][2], "added"))) });
    const draw = () => { rows = differenceRows(hunks, old.text.length, now.text.length, all.getAttribute("aria-pressed") === "true"); list.show(rows.length); };
    draw();
    const changed = inputs.flatMap(([i, i_end, j, j_end]) => Array.from({ length: Math.max(i_end - i, j_end - j) }, (_, k) => [i + k < i_end ? old.inputs[i + k][1] : "", j + k < j_end ? now.inputs[j + k][1] : ""]));
    body.replaceChildren(h("div", {},
      h("p", {}, `Left: ${graphName(other)}. Right: ${graphName(graph)}. `, hunks.length || changed.length ? `${plural(hunks.length, "place")} in the nodes and ${plural(changed.length, "input")} differ.` : "The nodes are equal but for what they read; the reason above says what is different."),
      changed.length ? h("details", { open: true }, h("summary", {}, "Inputs that differ"), table([["before", "mono", (row) => row[0] || "–"], ["now", "mono", (row) => row[1] || "–"]], changed.slice(0, 50))) : null,
      h("div.tools", {}, all), list.element));
  };
  fill();
  return body;
}

const recordedOf = (detail) => detail.stages.recorded || Object.values(detail.stages)[0];
