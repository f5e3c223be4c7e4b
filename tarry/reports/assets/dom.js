"use strict";
// Making elements, formatting, unpacking data. What comes from a program reaches the document as text only: nothing
// here or in the other files writes markup.

function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, String(value));
  }
  element.append(...children.flat(9).filter((child) => child != null && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value != null) element.setAttribute(key, String(value));
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

async function unpack(name) {
  const text = atob(document.getElementById(name).textContent);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const number = new Intl.NumberFormat("en");
const count = (value) => number.format(value);

function seconds(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${number.format(Math.round(value))} s`;
  if (size >= 1) return `${value.toFixed(size >= 10 ? 1 : 2)} s`;
  if (size >= 1e-3) return `${(value * 1e3).toPrecision(3)} ms`;
  return size === 0 ? "0" : `${(value * 1e6).toPrecision(3)} µs`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit === 0 ? value : value.toPrecision(3)} ${units[unit]}`;
}

const percent = (part, whole) => (whole > 0 ? `${(100 * part / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "–");
const plural = (amount, word) => `${count(amount)} ${word}${amount === 1 ? "" : "s"}`;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function shorten(path) {
  const parts = path.split("/");
  return parts.length > 4 ? `…/${parts.slice(-3).join("/")}` : path;
}

// Rows of one height, of which those in sight exist: a list of any length scrolls as a short one does.
class List {
  constructor(options) {
    this.height = options.height || 20;
    this.render = options.render;
    this.space = h("div.space");
    this.element = h(options.fixed ? "div.list.fixed" : "div.list", { tabindex: 0, ...(options.attributes || {}) }, this.space);
    this.element.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.show(options.count || 0);
  }
  show(amount) {
    this.count = amount;
    // Browsers cap the height of an element at some ten million pixels.
    this.space.style.height = `${Math.min(amount * this.height, 8e6)}px`;
    this.drawn = null;
    this.draw();
  }
  draw() {
    const all = this.count * this.height;
    const scale = all > 8e6 ? (all - this.element.clientHeight) / (8e6 - this.element.clientHeight) : 1;
    const top = this.element.scrollTop;
    const first = Math.max(0, Math.floor((top * scale) / this.height) - 10);
    const last = Math.min(this.count, first + Math.ceil(this.element.clientHeight / this.height) + 20);
    const key = `${first} ${last} ${top}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const rows = [];
    for (let k = first; k < last; k++) {
      const row = this.render(k);
      row.style.top = `${k * this.height - top * scale + top}px`;
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
  }
  go(index) {
    const all = this.count * this.height;
    const scale = all > 8e6 ? all / 8e6 : 1;
    this.element.scrollTop = Math.max(0, (index * this.height) / scale - this.element.clientHeight / 3);
    this.draw();
  }
}

function tooltip(event, text) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

// A table with columns [title, class, cell(row)].
function table(columns, rows, attributes) {
  const head = h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h(kind ? `th.${kind}` : "th", { scope: "col" }, title))));
  const body = h("tbody", {}, rows.map((row) => h(attributes && attributes.choice ? "tr.choice" : "tr", attributes && attributes.row ? attributes.row(row) : {}, columns.map(([, kind, cell]) => h(kind ? `td.${kind}` : "td", {}, cell(row))))));
  return h("div.scroll", {}, h("table", {}, head, body));
}

function search(label, change) {
  let timer = 0;
  return h("input", { type: "search", placeholder: label, "aria-label": label, oninput: (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => change(event.target.value.toLowerCase()), 80);
  } });
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
