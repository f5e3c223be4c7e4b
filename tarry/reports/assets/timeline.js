// What each thread did when. The canvas draws what is in sight; spans that fall into the same pixel are drawn once.

const ROW = 22, LABEL = 16, TOP = 24;
const BESIDE = { read: 1, fallback: 1, collective: 2 }; // what contains other spans, or goes on beside them, has a row of its own
const ROWS = ["", ": reads and fallbacks", ": collectives"];

class Timeline {
  constructor(runs) {
    this.tracks = this.makeTracks(runs);
    this.runs = runs;
    this.end = Math.max(1, ...this.tracks.map((track) => track.end));
    this.begin = Math.min(this.end, ...this.tracks.map((track) => track.begin));
    this.canvas = h("canvas.timeline", { tabindex: 0, role: "img", "aria-label": "Timeline" });
    this.step = h("input", { type: "number", min: 1, "aria-label": "Go to step", placeholder: "step", style: "width:90px", onchange: () => this.goTo(Number(this.step.value)) });
    const button = (text, act) => h("button.tool", { type: "button", onclick: act, "data-act": text }, text);
    this.element = h("section.panel", {},
      h("div.tools", {}, button("Zoom in", () => this.zoom(0.5)), button("Zoom out", () => this.zoom(2)), button("All", () => this.view(this.begin, this.end)), this.step,
        h("span.soft.grow", {}, "wheel: zoom; drag: move; hover: what it is"),
        button("Export trace", () => save("tarry-trace.json", JSON.stringify(chromeTrace(this.runs))))),
      this.canvas,
      h("div.legend", {}, state.data.categories.map((name) => h("span", {}, h("i", { style: `background:var(--${name})` }), name))),
      h("p.soft", {}, "The exported file opens in ui.perfetto.dev and chrome://tracing."));
    this.listen();
    this.view(this.begin, this.end);
    whenShown(this.canvas, () => this.draw());
  }

  makeTracks(runs) {
    const tracks = [];
    const first = Math.min(...runs.map((run) => run.header.started));
    for (const run of runs) {
      const spans = run.spans;
      const shift = state.data.mode === "ranks" ? Math.round((run.header.started - first) * 1e6) : 0;
      const rows = new Map();
      for (let k = 0; k < spans.start.length; k++) {
        const name = state.data.categories[spans.category[k]];
        const key = spans.thread[k] * ROWS.length + (BESIDE[name] || 0);
        if (!rows.has(key)) rows.set(key, []);
        rows.get(key).push(k);
      }
      for (const key of [...rows.keys()].sort((a, b) => a - b)) {
        const indices = rows.get(key);
        const thread = run.threads[Math.floor(key / ROWS.length)] || `thread ${Math.floor(key / ROWS.length)}`;
        const owner = runs.length > 1 ? `${run.name} · ` : "";
        let longest = 0, end = 0;
        for (const k of indices) { longest = Math.max(longest, spans.length[k]); end = Math.max(end, spans.start[k] + spans.length[k]); }
        tracks.push({ run, shift, indices, longest, name: `${owner}${thread}${ROWS[key % ROWS.length]}`, begin: spans.start[indices[0]] + shift, end: end + shift });
      }
    }
    return tracks;
  }

  view(from, to) {
    const span = Math.max(5, Math.min(to - from, (this.end - this.begin) * 1.05));
    const middle = (from + to) / 2;
    this.from = Math.max(this.begin - span * 0.02, Math.min(middle - span / 2, this.end + span * 0.02 - span));
    this.to = this.from + span;
    this.canvas.dataset.from = String(Math.round(this.from));
    this.canvas.dataset.to = String(Math.round(this.to));
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.view(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  goTo(step) {
    const steps = this.runs[0].steps;
    const k = steps.index.indexOf(step - 1);
    if (k >= 0) this.view(steps.start[k] - steps.seconds[k] * 0.1, steps.start[k] + steps.seconds[k] * 1.1);
  }

  listen() {
    const time = (event) => this.from + (event.offsetX / this.canvas.clientWidth) * (this.to - this.from);
    this.canvas.addEventListener("wheel", (event) => { event.preventDefault(); this.zoom(Math.exp(event.deltaY * 0.002), time(event)); }, { passive: false });
    let grabbed = null;
    this.canvas.addEventListener("pointerdown", (event) => { grabbed = { x: event.offsetX, from: this.from, to: this.to }; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { grabbed = null; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (grabbed) {
        const moved = ((event.offsetX - grabbed.x) / this.canvas.clientWidth) * (grabbed.to - grabbed.from);
        this.view(grabbed.from - moved, grabbed.to - moved);
      }
      tooltip(event, grabbed ? "" : this.describe(time(event), event.offsetY));
    });
    this.canvas.addEventListener("pointerleave", (event) => tooltip(event, ""));
    this.canvas.addEventListener("dblclick", () => this.view(this.begin, this.end));
    this.canvas.addEventListener("keydown", (event) => {
      const by = (this.to - this.from) / 5;
      const acts = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.view(this.from - by, this.to - by), ArrowRight: () => this.view(this.from + by, this.to + by) };
      if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
    });
  }

  // The spans of a track that may be in sight: those that start before its end, and not long before its begin.
  *visible(track) {
    const { start } = track.run.spans;
    const lower = this.from - track.longest - track.shift;
    let low = 0, high = track.indices.length;
    while (low < high) { const middle = (low + high) >> 1; if (start[track.indices[middle]] < lower) low = middle + 1; else high = middle; }
    for (; low < track.indices.length && start[track.indices[low]] + track.shift < this.to; low++) yield track.indices[low];
  }

  describe(time, y) {
    const track = this.tracks[Math.floor((y - TOP) / (ROW + LABEL))];
    if (!track || y < TOP) return "";
    const slack = ((this.to - this.from) / this.canvas.clientWidth) * 1.5;
    let best = -1;
    for (const k of this.visible(track)) {
      const { start, length } = track.run.spans;
      if (start[k] + track.shift - slack <= time && time <= start[k] + length[k] + track.shift + slack && (best < 0 || length[k] <= length[best])) best = k;
    }
    if (best < 0) return "";
    const { spans } = track.run;
    return `${state.data.categories[spans.category[best]]}: ${seconds(spans.length[best] / 1e6)}\n${spans.labels[spans.label[best]]}\nstep ${count(spans.step[best] + 1)}, at ${seconds(spans.start[best] / 1e6)}`;
  }

  draw() {
    const width = this.canvas.clientWidth, height = TOP + this.tracks.length * (ROW + LABEL) + 4;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const paper = this.canvas.getContext("2d");
    paper.scale(scale, scale);
    paper.font = "12px system-ui, sans-serif";
    paper.textBaseline = "middle";
    this.drawSteps(paper, width, height);
    const tints = state.data.categories.map((name) => color(name));
    const ink = color("ink"), soft = color("soft");
    let drawn = 0;
    for (const [row, track] of this.tracks.entries()) {
      const y = TOP + row * (ROW + LABEL) + LABEL;
      paper.fillStyle = soft;
      paper.fillText(track.name, 4, y - LABEL / 2);
      drawn += this.drawTrack(paper, track, y, width, tints);
    }
    paper.fillStyle = ink;
    this.canvas.dataset.drawn = String(drawn);
  }

  drawTrack(paper, track, y, width, tints) {
    const { start, length, category, label, labels } = track.run.spans;
    const per = width / (this.to - this.from);
    const last = new Array(tints.length).fill(-9);
    let drawn = 0;
    for (const k of this.visible(track)) {
      const left = (start[k] + track.shift - this.from) * per, wide = length[k] * per;
      if (left + wide < 0) continue;
      if (wide < 1 && Math.floor(left) === last[category[k]]) continue;
      last[category[k]] = Math.floor(left);
      paper.fillStyle = tints[category[k]];
      paper.fillRect(left, y, Math.max(wide - (wide > 3 ? 0.5 : 0), 0.8), ROW - 3);
      drawn++;
      if (wide > 60) {
        paper.save();
        paper.beginPath();
        paper.rect(Math.max(left, 0), y, Math.min(left + wide, width) - Math.max(left, 0) - 3, ROW);
        paper.clip();
        paper.fillStyle = "#fff";
        paper.fillText(`${state.data.categories[category[k]]} ${labels[label[k]]}`, Math.max(left, 0) + 5, y + (ROW - 3) / 2);
        paper.restore();
      }
    }
    return drawn;
  }

  // A scale of time, and stripes for steps where they are wide enough.
  drawSteps(paper, width, height) {
    const steps = this.runs[0].steps, per = width / (this.to - this.from);
    let low = 0, high = steps.start.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps.start[middle] + steps.seconds[middle] < this.from) low = middle + 1; else high = middle; }
    const typical = steps.seconds.length ? (steps.start.at(-1) - steps.start[0]) / steps.seconds.length : 0;
    const line = color("line"), soft = color("soft"), hover = color("hover");
    if (typical * per > 3 && this.runs.length === 1) {
      const labels = [];
      for (let k = low; k < steps.start.length && steps.start[k] < this.to; k++) {
        const left = (steps.start[k] - this.from) * per;
        if (steps.index[k] % 2) { paper.fillStyle = hover; paper.fillRect(left, 0, steps.seconds[k] * per, height); }
        if (!labels.length || left - labels.at(-1)[1] > 56) labels.push([`#${steps.index[k] + 1}`, left]);
      }
      paper.fillStyle = soft;
      for (const [text, left] of labels) paper.fillText(text, Math.max(left, 0) + 2, 9);
      return;
    }
    const rough = (this.to - this.from) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    for (let t = Math.ceil(this.from / unit) * unit; t < this.to; t += unit) {
      const left = (t - this.from) * per;
      paper.fillStyle = line; paper.fillRect(left, 0, 1, height);
      paper.fillStyle = soft; paper.fillText(seconds(t / 1e6), left + 3, 9);
    }
  }
}

// The trace event format of Chrome and Perfetto: a complete event for each span, metadata with names.
function chromeTrace(runs) {
  const events = [];
  const first = Math.min(...runs.map((run) => run.header.started));
  for (const [k, run] of runs.entries()) {
    const shift = state.data.mode === "ranks" ? Math.round((run.header.started - first) * 1e6) : 0;
    events.push({ ph: "M", pid: k, name: "process_name", args: { name: run.name } });
    for (const [thread, name] of Object.entries(run.threads)) {
      for (const [row, text] of ROWS.entries()) events.push({ ph: "M", pid: k, tid: Number(thread) * ROWS.length + row, name: "thread_name", args: { name: `${name}${text}` } });
    }
    const { start, length, category, thread, step, label, labels } = run.spans;
    for (let i = 0; i < start.length; i++) {
      const name = state.data.categories[category[i]];
      events.push({ ph: "X", pid: k, tid: thread[i] * ROWS.length + (BESIDE[name] || 0), ts: start[i] + shift, dur: length[i], name, cat: name, args: { what: labels[label[i]], step: step[i] + 1 } });
    }
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}
