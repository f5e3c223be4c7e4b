// The page: its head, its tabs, which run is shown.

const state = { data: null, run: null, tab: "Overview", details: new Map() };

const TABS = [
  ["Overview", () => overview(state.run)],
  ["Timeline", () => new Timeline(state.data.mode === "run" ? [state.run] : state.data.runs).element],
  ["Graphs", () => graphsView(state.run)],
  ["Costs", () => costsView(state.run)],
  ["Memory", () => memoryView(state.run)],
  ["Events", () => eventsView(state.run)],
];

function head() {
  const { data, run } = state;
  const command = run.header.command.find((word) => word.endsWith(".py")) || run.header.command[0] || "a program";
  const choice = data.runs.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => { state.run = data.runs[Number(event.target.value)]; head(); show(state.tab); } }, data.runs.map((each, k) => h("option", { value: k, selected: each === run }, each.name))) : null;
  const title = `${shorten(command)}${data.mode === "ranks" ? ` on ${data.runs.length} ranks` : ""}`;
  document.title = `${title} – tarry report`;
  document.getElementById("head").replaceChildren(...[
    h("h1", {}, title),
    h("span.about", {}, `${run.end.backend ? `${run.end.backend} on ${run.end.device}` : "tarry"}, torch ${run.header.torch}, ${new Date(run.header.started * 1000).toLocaleString()}`),
    choice,
  ].filter(Boolean));
}

function tabs() {
  const names = [...TABS];
  if (state.data.compare) names.splice(1, 0, [state.data.mode === "ranks" ? "Ranks" : "Compare", () => compareView(state.data)]);
  state.tabs = new Map(names);
  const bar = document.getElementById("tabs");
  bar.replaceChildren(...names.map(([name]) => h("button", { role: "tab", type: "button", "data-tab": name, onclick: () => show(name) }, name)));
  bar.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const buttons = [...bar.children];
    const at = buttons.indexOf(document.activeElement);
    if (by && at >= 0) buttons[(at + by + buttons.length) % buttons.length].focus();
  });
}

function show(name) {
  state.tab = name;
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-selected", String(button.dataset.tab === name));
  const main = document.getElementById("main");
  main.dataset.tab = name;
  main.replaceChildren(state.tabs.get(name)());
  tooltip(null, "");
  document.getElementById("source").hidden = true;
}

async function start() {
  const main = document.getElementById("main");
  if (typeof DecompressionStream === "undefined") {
    main.textContent = "This browser is too old for this page: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4).";
    return;
  }
  state.data = await unpack("data");
  state.run = state.data.runs[0];
  head();
  tabs();
  show(state.data.compare ? (state.data.mode === "ranks" ? "Ranks" : "Compare") : "Overview");
  document.body.dataset.ready = String(Math.round(performance.now()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(state.tab));
}

start();
