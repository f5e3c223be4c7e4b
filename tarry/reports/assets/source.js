// The drawer with the lines of the program around a place.

function place(text, label) {
  if (!text) return h("span.soft", {}, "an unknown line");
  return h("button.place", { type: "button", title: text, onclick: (event) => { event.stopPropagation(); showSource(text); } }, label || shorten(text));
}

function showSource(text) {
  const drawer = document.getElementById("source");
  const [, file, line] = /^(.*):(\d+)$/s.exec(text) || [null, text, "0"];
  const found = state.run.sources[file];
  const close = h("button.tool", { type: "button", onclick: () => { drawer.hidden = true; } }, "Close");
  const rows = [];
  let last = 0;
  for (const [key, content] of Object.entries(found ? found.lines : {})) {
    if (last && Number(key) > last + 1) rows.push(h("div.soft", {}, "      ⋮"));
    last = Number(key);
    rows.push(h(key === line ? "span.here" : "span", {}, h("span.no", {}, key), content, key === line ? null : "\n"));
  }
  drawer.replaceChildren(h("div", {},
    h("div.tools", {}, h("strong.grow.mono", {}, text), close),
    found && found.changed ? h("p.note", {}, "This file was changed after the run: lines may have moved.") : null,
    found ? h("pre", {}, rows) : h("p.soft", {}, "The page does not have this file: it could not be read where the page was made."),
  ));
  drawer.hidden = false;
  const here = drawer.querySelector(".here");
  if (here) here.scrollIntoView({ block: "center" });
  close.focus();
}

addEventListener("keydown", (event) => { if (event.key === "Escape") document.getElementById("source").hidden = true; });
