const ICONS = {
  first: "M3 2h2v12H3zM13 2v12L5.5 8z",
  back: "M11 2v12L3 8z",
  forward: "M5 2v12l8-6z",
  last: "M11 2h2v12h-2zM3 2v12l7.500-6z",
};
const MODES = [
  ["start", "Start", "what each request wants", false],
  ["execute", "Execute", "step by step", true],
  ["monitor", "Monitor", "gauges and lines", true],
  ["complete", "Complete", "key figures", false],
];
// Seats as wide as the names need, within reason.
const longestName = largest(data.ids.map((id) => id.length), 0);
app.style.setProperty("--seat", Math.min(7.5, Math.max(3.5, 0.8 + 0.5 * longestName)) + "rem");

let followed = -1;
let mode = 0;
let tick = 0, time = 0, playing = false, before = null;

const times = new Set([0]);
for (const run of data.runs) {
  run.start.forEach((start) => times.add(start));
  run.end.forEach((end) => times.add(end));
}
const ticks = Array.from(times).sort((a, b) => a - b);

const tabs = element(app, "div", "cbr-tabs");
tabs.setAttribute("role", "tablist");
tabs.setAttribute("aria-label", "Four views of the runs");
const panels = [];
const tabButtons = MODES.map(([name, title, hint], place) => {
  const tab = named(button(tabs, "cbr-tab", "", () => open(place)), "tab-" + name);
  element(tab, "span", "cbr-badge", String(place + 1)).setAttribute("aria-hidden", "true");
  const text = element(tab, "span", "", title);
  element(text, "small", "", hint).setAttribute("aria-hidden", "true");
  tab.setAttribute("role", "tab");
  tab.setAttribute("aria-controls", root.id + "-" + name);
  return tab;
});

const bar = element(app, "div", "cbr-controls");
bar.setAttribute("role", "group");
bar.setAttribute("aria-label", "Playback");
function control(name, label, onClick) {
  const made = named(button(bar, "cbr-button cbr-icon", "", onClick), name);
  made.setAttribute("aria-label", label);
  made.title = label;
  drawn(drawn(made, "svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }), "path", { d: ICONS[name] });
  return made;
}
const toFirst = control("first", "To the start", () => { pause(); go(0); });
const back = control("back", "Step back", () => { pause(); go(tick - 1); });
const play = named(button(bar, "cbr-button cbr-main cbr-play", "▶ Play", () => (playing ? pause() : start())), "play");
const forward = control("forward", "Step forward", () => { pause(); go(tick + 1); });
const toLast = control("last", "To the end", () => { pause(); go(ticks.length - 1); });

const sliderLabel = element(bar, "label", "cbr-slider");
element(sliderLabel, "span", "cbr-hidden", "Moment");
const slider = named(element(sliderLabel, "input"), "moment");
Object.assign(slider, { type: "range", min: "0", max: String(ticks.length - 1), step: "1", value: "0" });
const clock = named(element(sliderLabel, "output"), "clock");
clock.setAttribute("for", slider.id);

const jump = element(bar, "span", "cbr-jump");
const jumpLabel = element(jump, "label", "", "Step ");
const stepInput = named(element(jumpLabel, "input"), "step");
Object.assign(stepInput, { type: "number", min: "0", step: "1", inputMode: "numeric" });
const whose = named(element(null, "select"), "whose");
if (data.runs.length > 1) {
  const label = element(jump, "label", "", " of ");
  label.appendChild(whose);
}
data.runs.forEach((run, place) => { element(whose, "option", "", run.label).value = String(place); });
const speedLabel = element(bar, "label", "", "Speed ");
const speed = named(element(speedLabel, "select"), "speed");
// Seconds that all of it takes.
for (const [name, value] of [["¼×", 160], ["½×", 80], ["1×", 40], ["2×", 20], ["4×", 10]]) {
  element(speed, "option", "", name).value = String(value);
}
speed.value = "40";
const status = named(element(app, "p", "cbr-hidden"), "status");
status.setAttribute("aria-live", "polite");

MODES.forEach(([name], place) => {
  const panel = named(element(app, "div", "cbr-panel"), name);
  panel.setAttribute("role", "tabpanel");
  panel.setAttribute("aria-labelledby", tabButtons[place].id);
  panel.tabIndex = 0;
  panels.push(panel);
});
buildStart(panels[0], () => { open(1); go(0); start(); play.focus(); });
const following = named(element(panels[1], "p", "cbr-following"), "following");
const views = (() => {
  const grid = element(panels[1], "div", "cbr-runs");
  return data.runs.map((run) => buildRun(grid, run));
})();
key(panels[1]);
const charts = buildMonitor(panels[2]);
buildComplete(panels[3]);

function key(parent) {
  const list = element(parent, "ul", "cbr-key");
  list.setAttribute("aria-label", "What the squares look like");
  const entry = (className, name, value, text, mark) => {
    const item = element(list, "li");
    const sample = element(item, "span", className);
    sample.dataset[name] = value;
    sample.dataset.mark = mark || "";
    sample.setAttribute("aria-hidden", "true");
    element(item, "span", "", text);
    return sample;
  };
  entry("cbr-seat", "kind", "served", "served, one colour per request");
  if (data.runs.some((run) => run.padding.some(Boolean))) entry("cbr-seat", "kind", "padding", "finished, still computed (padding)");
  entry("cbr-seat", "kind", "held", "seated, not served");
  entry("cbr-seat", "kind", "empty", "empty seat");
  entry("cbr-cell", "state", "held", "block taken in this step").classList.add("cbr-new");
  const shares = data.runs.some((run) => run.caching || run.transfers.some(([, kind]) => kind === 0));
  if (shares) entry("cbr-cell", "state", "shared", "block shared by several", "×2");
  if (shares) entry("cbr-cell", "state", "held", "copied in this step (copy on write)", "→");
  if (data.runs.some((run) => run.prefixes.length)) entry("cbr-cell", "state", "cached", "cached prefix, no request refers to it");
  if (data.runs.some((run) => run.host)) {
    entry("cbr-cell", "state", "held", "swapped out in this step", "↓");
    entry("cbr-cell", "state", "held", "swapped in", "↑");
  }
}

function open(place, isFocused) {
  mode = place;
  tabButtons.forEach((tab, other) => {
    tab.setAttribute("aria-selected", String(other === place));
    tab.tabIndex = other === place ? 0 : -1;
    show(panels[other], other === place);
  });
  // Before the first step there is one thing to press, and behind the last one nothing to step through.
  show(bar, MODES[place][3]);
  if (isFocused) tabButtons[place].focus();
  draw();
}

function follow(request) {
  followed = followed === request ? -1 : request;
  draw();
}

function lifeOf(request) {
  const [arrival, prompt] = data.requests[request];
  const parts = data.runs.map((run) => {
    const { step, final } = moment(run, time);
    const stays = (run.staysOf.get(request) || []).filter((stay) => stay.first <= step);
    const stay = stays[stays.length - 1];
    if (run.absent.has(request)) return run.label + ": not served";
    if (final) return run.label + ": all done";
    if (!stay) return run.label + ": waits";
    if (stay.outcome === PREEMPTED && step >= stay.end) return run.label + (run.onHost(request, step) ? ": swapped out" : ": preempted, waits");
    if (step >= stay.done) return run.label + ": finished";
    return run.label + ": seat " + stay.seat + ", " + doing(run, stay, step).tokens + " of " + counted(outputOf(run, request), "token");
  });
  return " arrived at " + seconds(arrival) + ", prompt " + counted(prompt, "token") + ". " + parts.join(". ") + ".";
}

function drawFollowing() {
  const atEnd = tick === ticks.length - 1;
  const text = followed < 0 ? "Click a request to follow it through seats and blocks." : lifeOf(followed);
  const key = followed + text + atEnd;
  if (following.dataset.key === key) return;
  following.dataset.key = key;
  following.replaceChildren();
  if (followed >= 0) chip(following, followed).setAttribute("aria-pressed", "true");
  element(following, "span", "", text);
  if (atEnd) button(following, "cbr-button cbr-main cbr-next", "See the result ›", () => open(3, true));
}

function draw() {
  const sentences = [];
  if (mode === 1 || !playing) data.runs.forEach((run, place) => sentences.push(drawRun(run, views[place], ticks[tick])));
  if (mode === 1) drawFollowing();
  if (mode === 2) drawMonitor(charts, ticks[tick]);
  slider.value = String(tick);
  put(slider, "style", "--part:" + (ticks.length > 1 ? (100 * tick) / (ticks.length - 1) : 0) + "%");
  write(clock, seconds(ticks[tick]) + " of " + seconds(last));
  slider.setAttribute("aria-valuetext", seconds(ticks[tick]) + " of " + seconds(last));
  // While it plays, a screen reader would be flooded.
  if (!playing) write(status, sentences.join(" "));
  const run = data.runs[Number(whose.value)];
  if (document.activeElement !== stepInput) stepInput.value = String(Math.max(0, moment(run, ticks[tick]).step));
  stepInput.max = String(Math.max(0, run.start.length - 1));
  back.disabled = toFirst.disabled = tick === 0;
  forward.disabled = toLast.disabled = tick === ticks.length - 1;
}

function go(target) {
  tick = Math.max(0, Math.min(ticks.length - 1, target));
  time = ticks[tick];
  draw();
}

function frame(now) {
  if (!playing) return;
  if (!root.isConnected) return pause();
  if (before !== null) time += ((now - before) / 1000) * (last / Number(speed.value));
  before = now;
  let reached = tick;
  while (reached + 1 < ticks.length && ticks[reached + 1] <= time) reached += 1;
  if (reached !== tick) {
    tick = reached;
    draw();
  }
  if (tick === ticks.length - 1) pause();
  else requestAnimationFrame(frame);
}

function pause() {
  if (!playing) return;
  playing = false;
  play.textContent = "▶ Play";
  draw();
}

function start() {
  if (tick === ticks.length - 1) go(0);
  if (mode === 0 || mode === 3) open(1);
  playing = true;
  before = null;
  play.textContent = "❚❚ Pause";
  requestAnimationFrame(frame);
}

function jumpTo() {
  const run = data.runs[Number(whose.value)];
  const step = Math.max(0, Math.min(run.start.length - 1, Math.round(Number(stepInput.value)) || 0));
  pause();
  if (run.start.length) go(ticks.indexOf(run.start[step]));
}

slider.addEventListener("input", () => { pause(); go(Number(slider.value)); });
stepInput.addEventListener("change", jumpTo);
stepInput.addEventListener("keydown", (event) => { if (event.key === "Enter") jumpTo(); });
whose.addEventListener("change", () => draw());
tabs.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: mode + 1, ArrowLeft: mode - 1, Home: 0, End: MODES.length - 1 };
  if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  open((moves[event.key] + MODES.length) % MODES.length, true);
});
app.addEventListener("keydown", (event) => {
  const node = event.target;
  if (event.altKey || event.ctrlKey || event.metaKey || node.closest("input, select, summary, [role=tab]")) return;
  const isSpace = event.key === " ";
  if (isSpace && node.closest("button")) return;
  if (isSpace) playing ? pause() : start();
  else {
    const goals = {
      ArrowLeft: tick - 1, ArrowRight: tick + 1, PageUp: tick - 10, PageDown: tick + 10, Home: 0, End: ticks.length - 1,
    };
    if (!(event.key in goals) || node.closest(".cbr-scroll, .cbr-table-list")) return;
    pause();
    go(goals[event.key]);
  }
  event.preventDefault();
});

root.querySelector(".cbr-plain").hidden = true;
app.hidden = false;
open(0);
