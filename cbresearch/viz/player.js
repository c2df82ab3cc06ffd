(function () {
  "use strict";
  const SERVED = 0, HELD = 1, PADDING = 2;
  const KINDS = ["served", "held", "padding"];
  const LEAVES = 0, PREEMPTED = 1, FINISHED = 2, JOINS = 3;
  // What one request does, and what several do.
  const VERBS = [
    ["leaves seat", "leave seats"],
    ["is preempted from seat", "are preempted from seats"],
    ["is finished but keeps seat", "are finished but keep seats"],
    ["joins seat", "join seats"],
  ];
  const MAX_NAMED = 8;

  // Some notebook front ends run scripts in a way that hides which one it is.
  const here = document.currentScript && document.currentScript.closest(".cbr-player");
  const root = here || document.querySelector(".cbr-player:not([data-ready])");
  root.dataset.ready = "yes";
  const part = (name) => root.querySelector("#" + root.id + "-" + name);
  const data = JSON.parse(part("data").textContent);
  const play = part("play"), back = part("back"), forward = part("forward");
  const slider = part("moment"), clock = part("clock"), status = part("status"), speed = part("speed");

  function element(parent, tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  const last = Math.max(0, ...data.runs.map((run) => run.end[run.end.length - 1] || 0));
  const scale = last >= 1 || last === 0 ? [1, "s"] : last >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  function seconds(value) {
    return Number((value * scale[0]).toPrecision(4)).toLocaleString("en-US") + " " + scale[1];
  }
  const count = (value) => value.toLocaleString("en-US");
  const who = (request) => "request " + data.ids[request];

  // A cell is 0 when the seat is empty, else the request and what the seat does for it.
  function prepare(run) {
    const steps = run.start.length;
    run.cells = new Int32Array(steps * run.seats);
    run.events = Array.from({ length: steps + 1 }, () => []);
    for (const [request, seat, first, outcome, ...spans] of run.stays) {
      let step = first;
      let finished = -1;
      run.events[first].push([JOINS, request, seat]);
      for (let place = 0; place < spans.length; place += 2) {
        const kind = spans[place];
        if (kind === PADDING && finished < 0) finished = step;
        for (let rest = spans[place + 1]; rest > 0; rest -= 1, step += 1) {
          run.cells[step * run.seats + seat] = request * 4 + kind + 1;
        }
      }
      if (finished >= 0) run.events[finished].push([FINISHED, request, seat]);
      if (outcome === 0) run.events[step].push([LEAVES, request, seat]);
      if (outcome === 1) run.events[step].push([PREEMPTED, request, seat]);
    }
  }

  function build(run) {
    const card = element(part("runs"), "section", "cbr-run");
    card.setAttribute("aria-label", run.label);
    const name = element(card, "p", "cbr-name", run.label + " ");
    const view = { step: element(name, "span") };
    const track = element(card, "div", "cbr-track");
    track.setAttribute("aria-hidden", "true");
    // As long as the run on the clock that all runs share.
    const length = run.end[run.end.length - 1] || 0;
    track.style.width = (last ? Math.max(2, (100 * length) / last) : 100) + "%";
    view.done = element(track, "span", "cbr-fill");
    const seats = element(card, "div", "cbr-seats" + (run.seats > 32 ? " cbr-many" : ""));
    seats.setAttribute("role", "img");
    if (run.seats <= 32) seats.style.gridTemplateColumns = "repeat(" + Math.min(8, run.seats) + ", minmax(0, 1fr))";
    view.seats = seats;
    view.cells = Array.from({ length: run.seats }, () => {
      const cell = element(seats, "span", "cbr-seat");
      element(cell, "span");
      return cell;
    });
    const meters = element(card, "dl");
    // A pool far larger than what is ever held would leave its bar blank.
    view.mostBlocks = run.blocks > 3 * run.peak ? run.peak : run.blocks;
    const blocks = "KV blocks held" + (view.mostBlocks < run.blocks ? " (peak " + count(run.peak) + ")" : "");
    view.meters = ["waiting", "tokens out", blocks].map((title) => {
      element(meters, "dt", "", title);
      const bar = element(element(meters, "dd"), "span", "cbr-bar");
      return { fill: element(bar, "span", "cbr-fill"), value: element(meters, "dd") };
    });
    view.mostWaiting = run.waiting.reduce((most, waiting) => Math.max(most, waiting), 1);
    return view;
  }

  // The last step that started by then: -1 before the first.
  function stepAt(run, time) {
    let low = 0, high = run.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (run.start[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function meter(target, value, most, text) {
    target.fill.style.width = (most ? Math.min(100, (100 * value) / most) : 0) + "%";
    target.value.textContent = text;
  }

  function show(run, view, time) {
    const step = stepAt(run, time);
    const ended = step >= 0 && time >= run.end[step];
    const final = ended && step === run.start.length - 1;
    const cut = run.start.length < run.steps;
    view.step.textContent = !run.steps ? "no step"
      : final ? (cut ? "recording shown up to here" : "done after " + count(run.steps) + " steps, " + seconds(run.end[step]))
      : step < 0 || ended ? "idle" : "step " + count(step) + " of 0–" + count(run.steps - 1);
    const served = [];
    let padded = 0, held = 0;
    view.cells.forEach((cell, seat) => {
      const code = step < 0 || ended ? 0 : run.cells[step * run.seats + seat];
      const request = (code - 1) >> 2, kind = (code - 1) & 3;
      cell.dataset.kind = code ? KINDS[kind] : "empty";
      cell.firstChild.textContent = code ? data.ids[request] : "";
      const colored = code && kind !== PADDING;
      cell.style.background = colored ? data.fills[data.colors[request]] : "";
      cell.style.color = colored ? data.inks[data.colors[request]] : "";
      cell.title = "seat " + seat + ": " + (code ? who(request) + " (" + KINDS[kind] + ")" : "empty");
      if (code && kind === SERVED) served.push(data.ids[request]);
      if (code && kind === PADDING) padded += 1;
      if (code && kind === HELD) held += 1;
    });
    const free = run.seats - served.length - padded - held;
    view.seats.setAttribute("aria-label", count(run.seats) + " seats: " + served.length + " served" +
      (served.length ? " (requests " + served.slice(0, 32).join(", ") + ")" : "") + ", " +
      padded + " computed for nothing, " + held + " seated but not served, " + free + " empty");
    const length = run.end[run.end.length - 1] || 0;
    view.done.style.width = (length ? Math.min(100, (100 * time) / length) : 0) + "%";
    const waiting = step < 0 || ended ? 0 : run.waiting[step];
    const blocks = step < 0 || ended ? 0 : run.held[step];
    const out = step < 0 ? 0 : run.out[step];
    meter(view.meters[0], waiting, view.mostWaiting, count(waiting));
    meter(view.meters[1], out, run.tokens, count(out) + " of " + count(run.tokens));
    meter(view.meters[2], blocks, view.mostBlocks, count(blocks) + " of " + count(run.blocks));
    return sentence(run, step, ended, final && !cut, time);
  }

  function told(events, verbs) {
    if (!events.length) return "";
    if (events.length === 1) return who(events[0][1]) + " " + verbs[0] + " " + events[0][2];
    const named = events.slice(0, MAX_NAMED);
    const more = events.length > MAX_NAMED ? " and " + (events.length - MAX_NAMED) + " more" : "";
    return "requests " + named.map((event) => data.ids[event[1]]).join(", ") + more + " " + verbs[1] + " " +
      named.map((event) => event[2]).join(", ") + more;
  }

  function sentence(run, step, ended, done, time) {
    if (!run.start.length) return run.label + ": no step was run.";
    if (step < 0) return run.label + ": nothing has arrived yet.";
    if (ended && time > run.end[step]) return run.label + (done ? ": all done." : ": idle.");
    // Who leaves is told once: in the next step, or at once where no step follows at once.
    const resumes = step > 0 && run.start[step] > run.end[step - 1];
    const events = run.events[ended ? step + 1 : step].filter((event) =>
      ended ? event[0] === LEAVES : !(resumes && event[0] === LEAVES));
    const texts = VERBS.map((verbs, kind) => told(events.filter((event) => event[0] === kind), verbs));
    const where = done ? "all done" : ended ? "idle after step " + count(step) : "step " + count(step);
    return run.label + ", " + where + ": " + (texts.filter(Boolean).join("; ") || "nobody comes or goes") + ".";
  }

  status.style.minHeight = 1.45 * (data.runs.length + 1) + "em";
  data.runs.forEach(prepare);
  const views = data.runs.map(build);
  const moments = new Set([0]);
  for (const run of data.runs) {
    run.start.forEach((time) => moments.add(time));
    run.end.forEach((time) => moments.add(time));
  }
  const ticks = Array.from(moments).sort((a, b) => a - b);
  slider.max = String(ticks.length - 1);

  let tick = 0, playing = false, time = 0, before = null;

  function draw() {
    const sentences = data.runs.map((run, place) => show(run, views[place], ticks[tick]));
    slider.value = String(tick);
    clock.textContent = seconds(ticks[tick]);
    slider.setAttribute("aria-valuetext", seconds(ticks[tick]) + " of " + seconds(last));
    status.textContent = sentences.join("\n");
    back.disabled = tick === 0;
    forward.disabled = tick === ticks.length - 1;
  }

  function go(target) {
    tick = Math.max(0, Math.min(ticks.length - 1, target));
    time = ticks[tick];
    draw();
  }

  function frame(now) {
    if (!playing || !root.isConnected) return;
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
    playing = false;
    play.textContent = "Play";
    // While it plays, a screen reader would be flooded.
    status.setAttribute("aria-live", "polite");
  }

  function start() {
    if (tick === ticks.length - 1) go(0);
    playing = true;
    before = null;
    play.textContent = "Pause";
    status.setAttribute("aria-live", "off");
    requestAnimationFrame(frame);
  }

  play.addEventListener("click", () => (playing ? pause() : start()));
  back.addEventListener("click", () => { pause(); go(tick - 1); });
  forward.addEventListener("click", () => { pause(); go(tick + 1); });
  slider.addEventListener("input", () => { pause(); go(Number(slider.value)); });
  draw();
})();
