const SERVED = 0, HELD = 1, PADDING = 2;
const FINISHED = 0, PREEMPTED = 1, SEATED = 2, ABORTED = 3;

function unpacked(column) {
  if (!Array.isArray(column[0])) return column;
  const values = [];
  for (let place = 0; place < column[0].length; place += 2) {
    for (let rest = column[0][place + 1]; rest > 0; rest -= 1) values.push(column[0][place]);
  }
  return values;
}

// The last entry of a list that begins with a step up to this one, or undefined.
function upTo(list, step, first) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (first(list[middle]) <= step) low = middle + 1;
    else high = middle;
  }
  return list[low - 1];
}

// The entry of pairs (offset, value) that holds at an offset.
function grown(pairs, offset) {
  let value = 0;
  for (let place = 0; place < pairs.length && pairs[place] <= offset; place += 2) value = pairs[place + 1];
  return value;
}

function prepare(run, place) {
  run.place = place;
  [run.color, run.dash] = data.looks[place];
  for (const name of ["out", "waiting", "held", "kv", "cached", "swapped", "hosted"]) run[name] = unpacked(run[name]);
  const starts = run.start, steps = run.end.length;
  run.start = run.end.map((_, step) => step ? run.end[step - 1] : 0);
  for (let at = 0; at < starts.length; at += 2) run.start[starts[at]] = starts[at + 1];
  // A cell is 0 when the seat is empty, else one more than the number of the stay.
  run.cells = new Int32Array(steps * run.seats);
  run.staysOf = new Map();
  run.joins = new Map();
  run.leaves = new Map();
  const listed = (map, key, value) => map.has(key) ? map.get(key).push(value) : map.set(key, [value]);
  run.stays = run.stays.map(([request, seat, first, outcome, tokens, computed, spans, prefills], number) => {
    const stay = { request, seat, first, outcome, tokens, computed, spans, prefills, done: -1 };
    let step = first;
    for (let at = 0; at < spans.length; at += 2) {
      if (spans[at] === PADDING && stay.done < 0) stay.done = step;
      for (let rest = spans[at + 1]; rest > 0; rest -= 1, step += 1) run.cells[step * run.seats + seat] = number + 1;
    }
    stay.end = step;
    if (stay.done < 0) stay.done = step;
    listed(run.staysOf, request, stay);
    listed(run.joins, first, stay);
    listed(run.leaves, stay.done, stay);
    return stay;
  });
  run.ending = new Map(run.ended);
  run.outputs = new Map(run.outputs);
  run.absent = new Set(run.absent);
  run.gone = new Map();
  for (const [step, ...requests] of run.aborted) requests.forEach((request) => run.gone.set(request, step));
  run.moved = new Map(run.transfers.map(([step, ...flat]) => [step, flat]));
  run.tables = run.tables.map(([request, onHost, first, end, blocks, growth, losses]) =>
    ({ request, onHost, first, end, blocks, growth, losses }));
  const prefixes = run.prefixes;
  run.prefixes = [];
  for (const [first, ...flat] of prefixes) {
    for (let at = 0; at < flat.length; at += 2) run.prefixes.push({ block: flat[at], first, end: first + flat[at + 1] });
  }
  columns(run, steps);
}

// Columns that follow from the others: rows that did useful work, and means up to each step.
function columns(run, steps) {
  run.rows = new Array(steps).fill(0);
  run.padding = new Array(steps).fill(0);
  for (const stay of run.stays) {
    let step = stay.first;
    for (let at = 0; at < stay.spans.length; at += 2) {
      const column = stay.spans[at] === SERVED ? run.rows : stay.spans[at] === PADDING ? run.padding : null;
      for (let rest = stay.spans[at + 1]; rest > 0; rest -= 1, step += 1) if (column) column[step] += 1;
    }
  }
  const first = smallest(data.requests.map((request) => request[0]), Infinity);
  let rows = 0, tokens = 0, slots = 0;
  run.usedSoFar = [];
  run.emptySoFar = [];
  run.rate = [];
  for (let step = 0; step < steps; step += 1) {
    rows += run.rows[step];
    tokens += run.kv[step];
    slots += run.held[step] * run.size;
    run.usedSoFar.push((100 * rows) / ((step + 1) * run.seats));
    run.emptySoFar.push(slots ? 100 * (1 - tokens / slots) : 0);
    const time = run.end[step] - first;
    run.rate.push(time > 0 ? run.out[step] / time : 0);
  }
}

// Where a run is at a moment: before its first step (-1), in a step, or idle behind one.
function moment(run, time) {
  let low = 0, high = run.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.start[middle] <= time) low = middle + 1;
    else high = middle;
  }
  const step = low - 1;
  const ended = step >= 0 && time >= run.end[step];
  const final = ended && step === run.start.length - 1;
  return { step, ended, final, isCut: final && run.start.length < run.steps, runs: step >= 0 && !ended };
}

function stayAt(run, request, step) {
  return (run.staysOf.get(request) || []).find((stay) => stay.first <= step && step < stay.end);
}

function outputOf(run, request) {
  return run.outputs.has(request) ? run.outputs.get(request) : data.requests[request][2];
}

// What a seated request does in a step, and how far it is.
function doing(run, stay, step) {
  let kind = HELD, served = 0, at = stay.first;
  for (let place = 0; place < stay.spans.length && at <= step; place += 2) {
    const until = Math.min(step + 1, at + stay.spans[place + 1]);
    if (stay.spans[place] === SERVED) served += until - at;
    if (step < at + stay.spans[place + 1]) kind = stay.spans[place];
    at += stay.spans[place + 1];
  }
  let prefill = 0, isAgain = false, tokens = stay.tokens + served;
  for (let place = 0; place < stay.prefills.length; place += 3) {
    const when = stay.first + stay.prefills[place];
    if (when > step) break;
    if (!stay.prefills[place + 2]) tokens -= 1;
    if (when !== step) continue;
    prefill = stay.prefills[place + 1];
    // A request that lost its KV behind its first token computes its output again with the prompt.
    isAgain = tokens - stay.prefills[place + 2] > 0;
  }
  return { kind, prefill, isAgain, tokens: Math.min(tokens, outputOf(run, stay.request)) };
}

// The requests that wait in a step, or at a moment behind it when none runs: swapped ones, then preempted ones,
// then by arrival; only listed ones have a name.
function queue(run, step, time) {
  const waiting = [], swapped = [], preempted = [];
  const now = time === undefined ? run.start[step] : time;
  data.requests.forEach(([arrival], request) => {
    if (arrival > now || !isThere(run, request, time === undefined ? step : step + 1)) return;
    const stays = run.staysOf.get(request) || [];
    let lost = null;
    for (const stay of stays) {
      if (stay.first > step) break;
      if (step < stay.end || stay.outcome !== PREEMPTED) return;
      lost = stay;
    }
    if (!lost) waiting.push(request);
    else if (run.onHost(request, step)) swapped.push(request);
    else preempted.push([lost.end, request]);
  });
  preempted.sort((one, other) => other[0] - one[0]);
  waiting.sort((one, other) => data.requests[one][0] - data.requests[other][0] || one - other);
  return { swapped, waiting: [...preempted.map(([, request]) => request), ...waiting] };
}

// Whether a run has a request to serve, and has not aborted it by a step.
function isThere(run, request, step) {
  return !run.absent.has(request) && !(run.gone.get(request) <= step);
}

// The tables that there are in a step, of both pools.
function tablesAt(run, step) {
  if (step >= run.tables_until) return [];
  return run.tables.filter((held) => held.first <= step && step < held.end).map((held) => {
    const offset = step - held.first, lost = grown(held.losses, offset), number = grown(held.growth, offset);
    const before = offset ? grown(held.growth, offset - 1) : 0;
    return { request: held.request, onHost: held.onHost, lost, before, blocks: held.blocks.slice(0, number) };
  });
}

data.runs.forEach((run, place) => {
  prepare(run, place);
  const hosted = run.tables.filter((held) => held.onHost);
  run.onHost = (request, step) =>
    hosted.some((held) => held.request === request && held.first <= step && step < held.end);
});
