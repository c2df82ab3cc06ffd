// Some notebook front ends run scripts in a way that hides which one it is.
const here = document.currentScript && document.currentScript.closest(".cbr-player");
const root = here || document.querySelector(".cbr-player:not([data-ready])");
root.dataset.ready = "yes";
const data = JSON.parse(document.getElementById(root.id + "-data").textContent);
const app = root.querySelector(".cbr-app");
// Told by an element, since the name of the namespace looks like an address on the network.
const probe = document.createElement("div");
probe.innerHTML = "<svg></svg>";
const SVG = probe.firstChild.namespaceURI;

function element(parent, tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function drawn(parent, tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.appendChild(made);
  return made;
}

function named(made, name) {
  made.id = root.id + "-" + name;
  return made;
}

// What has not changed is not written again: a browser lays out anew for every write.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function put(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

function button(parent, className, text, onClick) {
  const made = element(parent, "button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A request as a chip that one can click to follow it.
function chip(parent, request, note) {
  const made = button(parent, "cbr-chip", "", () => follow(request));
  element(made, "span", "cbr-dot").style.background = data.fills[data.colors[request]];
  element(made, "bdi", "", data.ids[request]);
  if (note) element(made, "small", "", note);
  made.title = "follow request " + data.ids[request];
  return made;
}

function paint(node, request) {
  node.style.background = request < 0 ? "" : data.fills[data.colors[request]];
  node.style.color = request < 0 ? "" : data.inks[data.colors[request]];
}

function table(parent, caption, heads, numeric) {
  const box = element(parent, "div", "cbr-scroll");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", caption);
  const made = element(box, "table");
  element(made, "caption", "", caption);
  const row = element(element(made, "thead"), "tr");
  heads.forEach((head, place) => {
    const cell = element(row, "th", place >= numeric ? "cbr-number" : "", head);
    cell.scope = "col";
  });
  return element(made, "tbody");
}

function tableRow(body, texts, numeric) {
  const row = element(body, "tr");
  return texts.map((text, place) => {
    const cell = element(row, place ? "td" : "th", place >= numeric ? "cbr-number" : "", text);
    if (!place) cell.scope = "row";
    return cell;
  });
}

// Not by spreading: a call takes only so many arguments, and a run may have more steps and requests.
const largest = (values, least) => values.reduce((most, value) => Math.max(most, value), least);
const smallest = (values, most) => values.reduce((least, value) => Math.min(least, value), most);
const last = largest(data.runs.map((run) => run.end[run.end.length - 1] || 0), 0);
const longest = largest(data.runs.map((run) => run.duration), last);
function scaleOf(value) {
  return value >= 1 || value <= 0 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
}
const scale = scaleOf(last);
function seconds(value, digits) {
  return Number((value * scale[0]).toPrecision(digits || 4)).toLocaleString("en-US") + " " + scale[1];
}
const count = (value) => value.toLocaleString("en-US");
const short = (value) => Math.abs(value) >= 1000 ? count(Math.round(value)) : String(Number(value.toPrecision(4)));
const counted = (number, what) => count(number) + " " + what + (number === 1 ? "" : "s");
const some = (list, most) => list.length > most ? list.slice(0, most).join(", ") + " and " + (list.length - most) + " more"
  : list.length > 1 ? list.slice(0, -1).join(", ") + " and " + list[list.length - 1] : list.join("");
