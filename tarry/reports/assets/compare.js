// Two runs, or the ranks of one, side by side.

function compareView(data) {
  const two = data.mode === "compare";
  const names = data.runs.map((run) => run.name);
  const show = (value, unit) => (value == null ? "–" : unit === "s" ? seconds(value) : count(value));
  const last = (values) => {
    if (!two) {
      const known = values.filter((value) => value != null);
      return known.length && Math.min(...known) > 0 ? `${(Math.max(...known) / Math.min(...known)).toFixed(2)} ×` : "";
    }
    return values[0] && values[1] != null ? `${(values[1] / values[0]).toFixed(2)} ×` : "";
  };
  const both = (title, key) => names.map((name, k) => [two ? `${title}, ${"AB"[k]}` : name, "number", (row) => key(row, k)]);
  return h("div", { id: "compare" },
    two ? h("section.panel", {}, h("h2", {}, data.compare.verdict), names.map((name) => h("p.mono", {}, name))) : null,
    h("section.panel", {}, h("h2", {}, "Figures"), table([["", "", (row) => row.what], ...names.map((name, k) => [two ? "AB"[k] : name, "number", (row) => show(row.values[k], row.unit)]), [two ? "B / A" : "most / least", "number", (row) => last(row.values)]], data.compare.figures)),
    h("section.panel", {}, h("h2", {}, "Time per step"), stepPlot(data.runs)),
    h("section.panel", {}, h("h2", {}, "What lines cost, the largest differences first"), table([["where", "wide", (row) => place(row.place)], ["", "", (row) => row.group], ["what", "mono", (row) => row.what], ...both("time", (row, k) => seconds(row.seconds[k])), ...(two ? both("times", (row, k) => count(row.counts[k])) : [])], data.compare.places.slice(0, 100))),
    h("section.panel", {}, h("h2", {}, "Graphs, those first that not all have compiled"), table([["graph", "mono", (row) => row.key.slice(0, 8)], ["operators", "number", (row) => count(row.operators)], ["last line", "wide", (row) => (row.lines ? place(row.lines[1]) : "")], ...both("compile", (row, k) => (row.seconds[k] == null ? "–" : seconds(row.seconds[k])))], data.compare.graphs.slice(0, 100))),
  );
}
