// A graph as boxes and arrows. A part (a phase, a module, layers that are alike) is one box until it is opened; long runs
// of operators are boxes, too, so that there are never more boxes than a layout can be made for.

const MOST_BOXES = 260, LONG = 40, RUN = 15;

class Picture {
  constructor(stage) {
    this.stage = stage;
    this.parts = stage.tree.parts.map(([name, parent, alike, children]) => ({ name, parent, alike, children, nodes: [] }));
    stage.tree.part_of.forEach((part, node) => this.parts[part].nodes.push(node));
    this.sizes = this.parts.map((part) => part.nodes.length);
    for (const k of this.parentsLast()) if (this.parts[k].parent >= 0) this.sizes[this.parts[k].parent] += this.sizes[k];
    this.producer = new Map();
    stage.results.forEach((results, node) => results.forEach(([value]) => this.producer.set(value, node)));
    this.inputs = new Map(stage.inputs.map(([value, type]) => [value, type]));
    this.openParts = new Set([0]);
    this.openRuns = new Set();
    this.openFirst();
    this.holder = h("div.picture", { id: "picture" });
    this.said = h("p.mono", {}, "");
    const button = (text, act) => h("button.tool", { type: "button", onclick: act, "data-act": text }, text);
    this.element = h("div", {}, h("div.tools", {}, button("Open more", () => this.openMore()), button("Close all", () => { this.openParts = new Set([0]); this.openRuns.clear(); this.openFirst(); this.draw(); }), button("Fit", () => this.fit()),
      h("span.soft", {}, "click a box to open it, a title to close it; wheel: zoom; drag: move. Dashed: layers that are alike.")), this.holder, this.said);
    this.draw();
  }

  // Parts such that each comes before its parent: folds are last in the list, and above others in the tree.
  parentsLast() {
    const order = [], seen = new Set();
    const visit = (k) => { const stack = [[k, 0]]; while (stack.length) { const top = stack.at(-1); const child = this.parts[top[0]].children[top[1]++]; if (child === undefined) { order.push(top[0]); stack.pop(); } else if (!seen.has(child)) { seen.add(child); stack.push([child, 0]); } } };
    visit(0);
    return order;
  }

  // Open the first levels, as long as boxes are few. What has many things in it stays closed, and layers that are alike.
  openFirst() {
    const inside = (k) => this.parts[k].children.length + Math.min(this.parts[k].nodes.length, LONG);
    let level = [0];
    while (level.length) {
      level = level.flatMap((k) => this.parts[k].children).filter((k) => !this.parts[k].alike && inside(k) <= 10);
      for (const k of level) this.openParts.add(k);
      if (this.boxes().length > 24) { for (const k of level) this.openParts.delete(k); break; }
    }
  }

  openMore() {
    const closed = this.boxes().filter((box) => box.kind === "part").map((box) => box.part).sort((a, b) => this.sizes[a] - this.sizes[b]);
    for (const part of closed) { this.openParts.add(part); if (this.boxes().length > MOST_BOXES) { this.openParts.delete(part); break; } }
    this.draw();
  }

  isShown(part) {
    for (let k = part; k >= 0; k = this.parts[k].parent) if (!this.openParts.has(k)) return false;
    return true;
  }

  // What is to be seen: closed parts, runs of operators, operators; and for each node its box.
  boxes() {
    const found = [];
    this.boxOf = new Int32Array(this.stage.op.length).fill(-1);
    const add = (box, nodes) => { for (const node of nodes) this.boxOf[node] = found.length; found.push(box); };
    const all = (part) => this.parts[part].nodes.concat(...this.parts[part].children.map(all));
    const visit = (k) => {
      const part = this.parts[k];
      if (!this.openParts.has(k)) { add({ kind: "part", part: k, parent: part.parent }, all(k)); return; }
      for (const child of part.children) visit(child);
      if (part.nodes.length <= LONG) { for (const node of part.nodes) add({ kind: "node", node, parent: k }, [node]); return; }
      const size = Math.max(RUN, Math.ceil(part.nodes.length / LONG));
      for (let at = 0; at < part.nodes.length; at += size) {
        const nodes = part.nodes.slice(at, at + size), key = `${k}:${at}`;
        if (this.openRuns.has(key) && size <= 4 * RUN) for (const node of nodes) add({ kind: "node", node, parent: k }, [node]);
        else add({ kind: "run", key, nodes, parent: k, canOpen: size <= 4 * RUN }, nodes);
      }
    };
    visit(0);
    return found;
  }

  label(box) {
    if (box.kind === "part") {
      const part = this.parts[box.part];
      return [part.alike ? `${part.name}: ${part.alike} alike` : part.name, plural(this.sizes[box.part], "operator")];
    }
    if (box.kind === "run") {
      const ops = [...new Set(box.nodes.map((node) => this.short(node)))];
      return [`${ops.slice(0, 2).join(", ")}${ops.length > 2 ? ", …" : ""}`, plural(box.nodes.length, "operator")];
    }
    const type = /%\d+: ([^=]*?)(?:,| = |\))/.exec(this.stage.text[box.node]);
    return [this.short(box.node), type ? type[1].slice(0, 28) : ""];
  }

  short(node) { return this.stage.op[node].replace("aten::", ""); }

  layout(boxes) {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 44, marginx: 12, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({}));
    const clusters = new Set();
    boxes.forEach((box, k) => {
      const [title, small] = this.label(box);
      graph.setNode(`b${k}`, { width: Math.max(title.length * 7.4, small.length * 6.5) + 20, height: 38 });
      for (let part = box.parent, child = `b${k}`; part > 0; child = `p${part}`, part = this.parts[part].parent) {
        if (!clusters.has(part)) { clusters.add(part); graph.setNode(`p${part}`, {}); }
        graph.setParent(child, `p${part}`);
      }
    });
    const edges = new Set();
    this.stage.operands.forEach((operands, node) => {
      for (const value of operands) {
        const producer = this.producer.get(value);
        if (producer === undefined || this.boxOf[producer] === this.boxOf[node]) continue;
        edges.add(`${this.boxOf[producer]} ${this.boxOf[node]}`);
      }
    });
    for (const edge of edges) { const [from, to] = edge.split(" "); graph.setEdge(`b${from}`, `b${to}`); }
    dagre.layout(graph);
    return { graph, clusters };
  }

  draw() {
    const boxes = this.boxes();
    const { graph, clusters } = this.layout(boxes);
    const depth = (part) => (part <= 0 ? 0 : 1 + depth(this.parts[part].parent));
    const inner = svg("g", {});
    for (const part of [...clusters].sort((a, b) => depth(a) - depth(b))) inner.append(this.cluster(part, graph.node(`p${part}`)));
    for (const edge of graph.edges()) {
      const points = graph.edge(edge).points;
      inner.append(svg("path", { d: points.map((p, k) => `${k ? "L" : "M"}${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join(""), "marker-end": "url(#arrow)" }));
    }
    boxes.forEach((box, k) => inner.append(this.box(box, graph.node(`b${k}`))));
    const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z", style: "fill:var(--soft);stroke:none" }));
    this.picture = svg("svg", { role: "img", "aria-label": "Picture of the graph" }, svg("defs", {}, arrow), inner);
    this.inner = inner;
    this.size = graph.graph();
    this.holder.replaceChildren(this.picture);
    this.holder.dataset.boxes = String(boxes.length);
    this.listen();
    this.fit();
  }

  cluster(part, place) {
    const each = this.parts[part];
    const title = each.alike ? `${each.name}: ${each.alike} alike` : each.name;
    const text = svg("text", { x: place.x - place.width / 2 + 8, y: place.y - place.height / 2 + 14 });
    text.textContent = `− ${title}`;
    text.addEventListener("click", () => { this.openParts.delete(part); this.draw(); });
    return svg("g", { class: `open${each.alike ? " alike" : ""}` }, svg("rect", { x: place.x - place.width / 2, y: place.y - place.height / 2, width: place.width, height: place.height }), text);
  }

  box(box, place) {
    const [title, small] = this.label(box);
    const left = place.x - place.width / 2, top = place.y - place.height / 2;
    const line = (text, y, kind) => { const element = svg("text", { x: place.x, y, "text-anchor": "middle", class: kind }); element.textContent = text; return element; };
    const kind = box.kind === "part" ? `part${this.parts[box.part].alike ? " alike" : ""}` : box.kind === "run" && box.canOpen ? "part" : "";
    const group = svg("g", { class: kind, "data-box": title }, svg("rect", { x: left, y: top, width: place.width, height: place.height }), line(title, top + 16, ""), line(small, top + 30, "small"));
    group.addEventListener("click", () => { if (!this.moved) this.choose(box, group); });
    return group;
  }

  choose(box, group) {
    if (box.kind === "part") this.openParts.add(box.part);
    else if (box.kind === "run" && box.canOpen) this.openRuns.add(box.key);
    else {
      for (const each of this.inner.querySelectorAll(".chosen")) each.classList.remove("chosen");
      group.classList.add("chosen");
      const node = box.kind === "node" ? box.node : box.nodes[0];
      this.said.replaceChildren(...nodeLine(this.stage, node).flat());
      return;
    }
    if (this.boxes().length > MOST_BOXES) {
      if (box.kind === "part") this.openParts.delete(box.part); else this.openRuns.delete(box.key);
      this.said.textContent = "That would be too many boxes: close some first.";
      return;
    }
    this.draw();
  }

  fit() {
    const width = this.holder.clientWidth || 900, height = this.holder.clientHeight || 600;
    const scale = Math.max(0.45, Math.min(1.2, width / this.size.width, height / this.size.height));
    this.at = { x: Math.max(0, (width - this.size.width * scale) / 2), y: 0, scale };
    this.place();
  }

  place() { this.inner.setAttribute("transform", `translate(${this.at.x} ${this.at.y}) scale(${this.at.scale})`); }

  listen() {
    this.picture.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.picture.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      const scale = Math.max(0.03, Math.min(4, this.at.scale * Math.exp(-event.deltaY * 0.0015)));
      this.at = { x: x - ((x - this.at.x) * scale) / this.at.scale, y: y - ((y - this.at.y) * scale) / this.at.scale, scale };
      this.place();
    }, { passive: false });
    let grabbed = null;
    this.picture.addEventListener("pointerdown", (event) => { grabbed = { x: event.clientX, y: event.clientY, at: { ...this.at } }; this.moved = false; });
    this.picture.addEventListener("pointermove", (event) => {
      if (!grabbed || !event.buttons) return;
      const x = event.clientX - grabbed.x, y = event.clientY - grabbed.y;
      this.moved = this.moved || Math.abs(x) + Math.abs(y) > 4;
      this.at = { ...grabbed.at, x: grabbed.at.x + x, y: grabbed.at.y + y };
      this.place();
    });
    this.picture.addEventListener("pointerup", () => { grabbed = null; });
  }
}
