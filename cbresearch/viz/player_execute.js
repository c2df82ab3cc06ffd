// The second tab: what happens in a step, and why.
const WHY = {
  budget: "the step's token budget is used up",
  seats: "no seat is free",
  blocks: "the KV pool has no room",
  sibling: "a parallel sample is computing the prompt",
  chunk: "the whole prompt does not fit what is left of the token budget",
  policy: "the policy serves other requests first",
};
const KIND_NAMES = ["served", "seated, not served", "finished, still computed"];
const MAX_SEATS = 256, MAX_QUEUE = 12, MAX_NAMED = 4;
const ids = (requests, most) => some(requests.map((request) => data.ids[request]), most || MAX_NAMED);

function buildRun(parent, run) {
  const card = element(parent, "section", "cbr-card cbr-run");
  card.setAttribute("aria-label", run.label);
  const view = { card };
  const head = element(card, "div", "cbr-head");
  const title = element(head, "h3");
  swatch(title, run);
  element(title, "bdi", "", run.label);
  view.where = element(head, "span", "cbr-where");
  const track = element(card, "div", "cbr-track");
  track.setAttribute("aria-hidden", "true");
  // As long as the run on the clock that all runs share.
  track.style.width = (last ? Math.max(2, (100 * (run.end[run.end.length - 1] || 0)) / last) : 100) + "%";
  view.done = element(track, "span");
  view.story = element(card, "ul", "cbr-story");
  const seats = element(card, "div", "cbr-seats" + (run.seats > 32 ? " cbr-many" : ""));
  seats.setAttribute("role", "group");
  view.seats = seats;
  view.tiles = Array.from({ length: Math.min(run.seats, MAX_SEATS) }, (_, seat) => {
    const tile = button(seats, "cbr-seat", "", () => { if (tile.request >= 0) follow(tile.request); });
    tile.request = -1;
    tile.label = element(tile, "bdi");
    tile.what = element(tile, "small");
    tile.bar = element(element(tile, "i", "cbr-progress"), "b");
    return tile;
  });
  if (run.seats > MAX_SEATS) element(card, "p", "cbr-quiet", "The first " + MAX_SEATS + " of " + count(run.seats) + " seats are drawn.");
  view.meters = ["waiting", "tokens out", "KV blocks held"].map((name, place) => {
    if (!place) view.list = element(card, "dl", "cbr-meters");
    element(view.list, "dt", "", name);
    const bar = element(element(view.list, "dd"), "span", "cbr-bar");
    const value = element(view.list, "dd", "cbr-value");
    value.dataset.name = ["waiting", "out", "held"][place];
    return { fill: element(bar, "span"), value };
  });
  view.mostWaiting = largest(run.waiting, 1);
  view.queue = element(card, "div", "cbr-queue");
  view.blocks = buildBlocks(card, run);
  return view;
}

function swatch(parent, run) {
  const svg = drawn(parent, "svg", { viewBox: "0 0 26 10", class: "cbr-swatch", "aria-hidden": "true" });
  const line = drawn(svg, "line", { x1: 1, y1: 5, x2: 25, y2: 5, "stroke-dasharray": run.dash });
  line.style.setProperty("--look", run.color);
}

function meter(target, value, most, text) {
  target.fill.style.width = (most ? Math.min(100, (100 * value) / most) : 0) + "%";
  write(target.value, text);
}

function drawRun(run, view, time) {
  const at = moment(run, time), { step, runs } = at;
  write(view.where, !run.steps ? "no step"
    : at.isCut ? "recording shown up to here"
    : at.final ? "done after " + counted(run.steps, "step") + ", " + seconds(run.end[step])
    : !runs ? "idle" : "step " + count(step) + " of 0–" + count(run.steps - 1));
  view.card.classList.toggle("cbr-is-done", at.final);
  const number = { empty: 0, served: 0, held: 0, padding: 0 };
  const served = [];
  view.tiles.forEach((tile, seat) => {
    const stay = runs ? run.stays[run.cells[step * run.seats + seat] - 1] : undefined;
    const now = stay ? doing(run, stay, step) : null;
    const kind = now ? ["served", "held", "padding"][now.kind] : "empty";
    number[kind] += 1;
    if (tile.dataset.kind !== kind) tile.dataset.kind = kind;
    tile.request = stay ? stay.request : -1;
    paint(tile, stay && now.kind !== PADDING ? stay.request : -1);
    write(tile.label, stay ? data.ids[stay.request] : "");
    const wanted = stay ? outputOf(run, stay.request) : 0;
    const text = !stay ? "seat " + seat : now.kind === PADDING ? "finished" : now.kind === HELD ? "not served"
      : now.prefill ? (now.isAgain ? "again " : "prompt ") + count(now.prefill) : count(now.tokens) + " / " + count(wanted);
    write(tile.what, text);
    tile.bar.style.width = stay && wanted ? (100 * now.tokens) / wanted + "%" : "0";
    const label = "seat " + seat + ": " + (stay ? data.ids[stay.request] + ", " + KIND_NAMES[now.kind] + ", " +
      (now.prefill ? (now.isAgain ? "again " : "") + "prefill of " + counted(now.prefill, "token") + ", " : "") +
      now.tokens + " of " + counted(wanted, "output token") : "empty");
    put(tile, "aria-label", label);
    put(tile, "title", label);
    put(tile, "aria-pressed", String(stay !== undefined && stay.request === followed));
    tile.disabled = !stay;
    if (now && now.kind === SERVED) served.push(stay.request);
  });
  put(view.seats, "aria-label", counted(run.seats, "seat") + ": " + number.served + " served, " + number.padding +
    " computed for nothing, " + number.held + " seated but not served, " + number.empty + " empty");
  const length = run.end[run.end.length - 1] || 0;
  view.done.style.width = (length ? Math.min(100, (100 * time) / length) : 0) + "%";
  const outside = queueAt(run, at, time);
  const waiting = outside.number, out = step < 0 ? 0 : run.out[step], held = runs ? run.held[step] : 0;
  meter(view.meters[0], waiting, view.mostWaiting, count(waiting));
  meter(view.meters[1], out, run.tokens, count(out) + " of " + count(run.tokens));
  meter(view.meters[2], held, run.blocks > 3 * run.peak ? run.peak : run.blocks, count(held) + " of " + count(run.blocks));
  drawQueue(run, view.queue, outside);
  drawBlocks(run, view.blocks, at);
  const lines = story(run, at, time);
  tell(view.story, lines);
  return run.label + ": " + lines.map(([, text]) => text).join("; ") + ".";
}

// The requests that wait at a moment, and how many: in a step as the run counted them, unlisted ones included.
function queueAt(run, { step, runs, final }, time) {
  if (runs) return { ...queue(run, step), number: run.waiting[step], numSwapped: run.swapped[step] };
  if (final || !run.start.length) return { swapped: [], waiting: [], number: 0, numSwapped: 0 };
  const { swapped, waiting } = queue(run, step, time);
  return { swapped, waiting, number: swapped.length + waiting.length, numSwapped: swapped.length };
}

function drawQueue(run, box, { swapped, waiting, number, numSwapped }) {
  const key = [number, numSwapped, followed, ...swapped.slice(0, MAX_QUEUE), "/", ...waiting.slice(0, MAX_QUEUE)].join(" ");
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren();
  const group = (title, requests, total) => {
    const row = element(box, "div", "cbr-chips");
    element(row, "span", "cbr-quiet", title);
    if (!total) element(row, "span", "cbr-quiet", "empty");
    requests.slice(0, Math.min(MAX_QUEUE, total)).forEach((request) => {
      chip(row, request).setAttribute("aria-pressed", String(request === followed));
    });
    const more = total - Math.min(MAX_QUEUE, requests.length, total);
    if (more > 0) element(row, "span", "cbr-quiet", "+ " + count(more));
  };
  group("queue", waiting, number - numSwapped);
  if (run.host) group("swapped to the host ↓", swapped, numSwapped);
}

// Lines of a symbol and a text.
function tell(list, lines) {
  const key = lines.map((line) => line.join("")).join("\n");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren();
  for (const [mark, text] of lines) {
    const line = element(list, "li");
    element(line, "span", "cbr-mark", mark).setAttribute("aria-hidden", "true");
    element(line, "span", "", text);
  }
  // What stands below had better not jump from step to step: the list keeps the height that it once needed.
  if (!list.offsetParent) return;
  if (list.offsetWidth !== list.lastWidth) list.style.minHeight = "";
  list.lastWidth = list.offsetWidth;
  list.style.minHeight = list.offsetHeight + "px";
}

function story(run, at, time) {
  const { step, runs } = at;
  if (!run.start.length) return [["○", "no step was run"]];
  if (at.isCut) return [["○", "the recording is shown up to here"]];
  if (at.final) return [["✓", "all is done: " + counted(run.out[step], "token") + " in " + counted(run.steps, "step")],
    ...(time < last ? [["○", "the other runs go on"]] : [])];
  if (!runs) return [["○", idling(run, step, queueAt(run, at, time).number, time)]];
  return [...leaving(run, step), ...joining(run, step), ...computing(run, step), ...moving(run, step), ...waitingFor(run, step)];
}

// No request runs: none is there, or those that are wait for more to come.
function idling(run, step, number, time) {
  const next = seconds(run.start[step + 1]);
  if (number) return "idle: " + count(number) + (number > 1 ? " wait" : " waits") + " for the next batch, which begins at " + next;
  const coming = data.requests.map(([arrival], request) => arrival > time && isThere(run, request, step + 1) ? arrival : Infinity);
  const first = seconds(smallest(coming, run.start[step + 1]));
  const why = step < 0 ? "no request has arrived yet" : "idle: no request arrives before " + first;
  return why + (first === next ? "" : "; the next batch begins at " + next);
}

function leaving(run, step) {
  const lines = [];
  const went = (run.leaves.get(step) || []).filter((stay) => stay.done === step);
  const preempted = went.filter((stay) => stay.outcome === PREEMPTED);
  const swapped = preempted.filter((stay) => run.onHost(stay.request, step));
  const thrown = preempted.filter((stay) => !run.onHost(stay.request, step));
  const lose = (stays) => ids(stays.map((stay) => stay.request)) + (stays.length > 1 ? " lose their seats" : " loses seat " + stays[0].seat) +
    ", since other requests need " + (stays.length > 1 ? "their" : "its") + " room: ";
  if (swapped.length) lines.push(["↓", lose(swapped) + "preempted, the KV moves to the host (swap)"]);
  if (thrown.length) lines.push(["✗", lose(thrown) + "preempted, the KV is given up and computed again later"]);
  const aborted = (run.aborted.find(([when]) => when === step) || []).slice(1);
  if (aborted.length) lines.push(["✗", ids(aborted) + (aborted.length > 1 ? " are" : " is") + " aborted"]);
  return lines;
}

function joining(run, step) {
  const joins = run.joins.get(step) || [];
  if (!joins.length) return [];
  const left = (stay) => {
    const before = step ? run.stays[run.cells[(step - 1) * run.seats + stay.seat] - 1] : undefined;
    return before && before.end === step ? ", which " + data.ids[before.request] + " left" : "";
  };
  const back = (stay) => (run.staysOf.get(stay.request)[0] === stay ? "" : " again");
  if (joins.length > 2) {
    const cached = joins.reduce((sum, stay) => sum + stay.computed, 0);
    return [["→", ids(joins.map((stay) => stay.request)) + " take seats " + some(joins.map((stay) => String(stay.seat)), MAX_NAMED) +
      (cached ? "; " + counted(cached, "token") + " of their KV are there already" : "")]];
  }
  return joins.map((stay) => ["→", data.ids[stay.request] + " takes seat " + stay.seat + back(stay) + left(stay) +
    (stay.computed ? "; " + counted(stay.computed, "token") + " of its KV " + (stay.computed > 1 ? "are" : "is") + " there already" : "")]);
}

function computing(run, step) {
  const prefills = { requests: [], tokens: 0 }, again = { requests: [], tokens: 0 };
  const decodes = [], padded = [], finished = [];
  for (let seat = 0; seat < run.seats; seat += 1) {
    const stay = run.stays[run.cells[step * run.seats + seat] - 1];
    if (!stay) continue;
    const now = doing(run, stay, step);
    if (now.kind === PADDING) padded.push(stay);
    if (now.kind !== SERVED) continue;
    if (now.prefill) {
      const part = now.isAgain ? again : prefills;
      part.requests.push(stay.request);
      part.tokens += now.prefill;
    } else decodes.push(stay.request);
    if (stay.outcome === FINISHED && stay.done === step + 1) finished.push(stay);
  }
  const lines = [], parts = [];
  const all = (requests) => requests.length === 1 || requests.length <= MAX_NAMED ? ids(requests) : counted(requests.length, "request");
  for (const [{ requests, tokens }, verb, what] of [[prefills, " compute", "prompt token"], [again, " recompute", "token"]]) {
    if (requests.length) parts.push(all(requests) + verb + (requests.length > 1 ? " " : "s ") + counted(tokens, what));
  }
  if (decodes.length) parts.push(all(decodes) + (decodes.length > 1 ? " decode a token each" : " decodes a token"));
  if (parts.length) lines.push(["●", parts.join("; ")]);
  for (const stay of finished.slice(0, finished.length > 2 ? 0 : 2)) {
    const how = run.ending.get(stay.request);
    lines.push(["✓", data.ids[stay.request] + (how === "error" ? " fails with " : " finishes with ") +
      counted(outputOf(run, stay.request), "token") + (how === "stop" ? " (the model stops)" : "")]);
  }
  if (finished.length > 2) lines.push(["✓", ids(finished.map((stay) => stay.request)) + " finish"]);
  if (padded.length) {
    lines.push(["▨", ids(padded.map((stay) => stay.request)) + (padded.length > 1 ? " are" : " is") + " finished, yet the batch still computes " +
      (padded.length > 1 ? "their rows" : "the row") + " for nothing"]);
  }
  return lines;
}

function moving(run, step) {
  const moved = run.moved.get(step) || [], number = [0, 0, 0];
  for (let place = 0; place < moved.length; place += 3) number[moved[place]] += 1;
  const parts = [];
  if (number[1]) parts.push(counted(number[1], "block") + " to the host (swap out)");
  if (number[2]) parts.push(counted(number[2], "block") + " back to the device (swap in)");
  if (number[0]) parts.push(counted(number[0], "block") + " copied before being written (copy on write)");
  return parts.length ? [["⇅", "moved: " + parts.join(", ")]] : [];
}

function waitingFor(run, step) {
  const [, idle, waiting] = upTo(run.reasons, step, (said) => said[0]) || [0, {}, {}];
  const isClosed = !run.joins.has(step);
  const told = (reason) => reason === "policy" && isClosed ? "the policy admits no request now" : WHY[reason] || reason;
  const why = (reasons) => Object.entries(reasons).map(([reason, number]) =>
    (Object.keys(reasons).length > 1 ? count(number) + " because " : "") + told(reason)).join(", ");
  const total = (reasons) => Object.values(reasons).reduce((sum, number) => sum + number, 0);
  const lines = [];
  if (total(idle)) lines.push(["◌", count(total(idle)) + (total(idle) > 1 ? " sit" : " sits") + " unserved: " + why(idle)]);
  if (total(waiting)) lines.push(["…", count(total(waiting)) + (leaving(run, step).length ? " more" : "") + (total(waiting) > 1 ? " wait" : " waits") + ": " + why(waiting)]);
  return lines;
}
