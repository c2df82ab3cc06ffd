// The physical blocks of both pools, and which requests refer to them.
const MAX_TABLE = 16;
const NO_OWNER = { free: "free", cached: "cached prefix, no request refers to it" };

function buildBlocks(parent, run) {
  const box = element(parent, "div", "cbr-pools");
  const view = { box };
  const pool = (title, [number, used], size, onHost) => {
    const head = element(box, "p", "cbr-pool-title");
    element(head, "b", "", title);
    const note = element(head, "span", "cbr-quiet");
    const map = element(box, "div", "cbr-map" + (number > 128 ? " cbr-fine" : ""));
    map.setAttribute("role", "img");
    const cells = Array.from({ length: number }, (_, block) => {
      const cell = element(map, "span", "cbr-cell");
      cell.dataset.block = String(block);
      cell.label = element(cell, "bdi");
      return cell;
    });
    if (number < size) {
      element(box, "p", "cbr-quiet", "Blocks 0–" + count(number - 1) + " of " + count(size) + " are drawn" +
        (used > number ? "." : "; the steps shown use no other."));
    }
    return { title, note, map, cells, size, onHost };
  };
  view.pools = [pool("device pool", run.cells_drawn, run.blocks, 0)];
  if (run.host) view.pools.push(pool("host pool", run.host_cells, run.host, 1));
  const details = element(box, "details", "cbr-tables");
  view.summary = element(details, "summary", "", "Block tables");
  view.list = element(details, "div", "cbr-table-list");
  details.open = run.seats <= 8;
  details.addEventListener("toggle", () => { view.key = ""; draw(); });
  view.details = details;
  view.cut = element(box, "p", "cbr-quiet");
  return view;
}

function drawBlocks(run, view, { step, runs }) {
  const isCut = runs && step >= run.tables_until;
  const key = [step, runs, followed, view.details.open].join();
  if (view.key === key) return;
  view.key = key;
  const held = runs && !isCut ? tablesAt(run, step) : [];
  write(view.cut, isCut ? "Block tables are left out from step " + count(run.tables_until) + " on, to keep the page small." : "");
  const kept = runs && !isCut ? run.prefixes.filter((one) => one.first <= step && step < one.end).map((one) => one.block) : [];
  for (const pool of view.pools) {
    drawPool(run, pool, step, held.filter((one) => one.onHost === pool.onHost), pool.onHost ? [] : kept, runs, isCut);
  }
  if (!view.details.open) return;
  const seat = (one) => (one.onHost ? Infinity : (stayAt(run, one.request, step) || { seat: run.seats }).seat);
  drawTables(view.list, held.sort((one, other) => seat(one) - seat(other) || one.request - other.request));
}

function drawPool(run, pool, step, held, kept, runs, isCut) {
  const cachedOnes = new Set(kept);
  const owners = pool.cells.map(() => []);
  for (const one of held) {
    for (let place = one.lost; place < one.blocks.length; place += 1) {
      const block = one.blocks[place];
      if (owners[block]) owners[block].push([one.request, place, place >= one.before]);
    }
  }
  const marks = new Map();
  const moved = runs ? run.moved.get(step) || [] : [];
  for (let at = 0; at < moved.length; at += 3) {
    const [kind, source, target] = moved.slice(at, at + 3);
    if (kind === 1) marks.set(pool.onHost ? target : source, "↓");
    if (kind === 2) marks.set(pool.onHost ? source : target, "↑");
    if (kind === 0 && !pool.onHost) marks.set(target, "→");
  }
  let shared = 0;
  pool.cells.forEach((cell, block) => {
    const mine = owners[block], mark = marks.get(block) || "";
    const chosen = mine.find(([request]) => request === followed) || mine[0];
    const state = !chosen ? (cachedOnes.has(block) ? "cached" : "free") : mine.length > 1 ? "shared" : "held";
    if (mine.length > 1) shared += 1;
    const stay = chosen && runs && !pool.onHost ? stayAt(run, chosen[0], step) : undefined;
    const isPadding = stay !== undefined && doing(run, stay, step).kind === PADDING;
    cell.dataset.state = isPadding ? "padding" : state;
    cell.classList.toggle("cbr-new", Boolean(chosen && chosen[2]));
    cell.classList.toggle("cbr-dim", followed >= 0 && Boolean(chosen) && chosen[0] !== followed);
    put(cell, "data-mark", mark || (mine.length > 1 ? "×" + mine.length : ""));
    paint(cell, chosen && !isPadding ? chosen[0] : -1);
    const text = !chosen ? String(block) : chosen[0] === followed ? "#" + chosen[1] : data.ids[chosen[0]];
    write(cell.label, text);
    put(cell, "title", pool.title + ", block " + block + ": " + (mine.length ? mine.map(([request, place]) =>
      data.ids[request] + " (its block " + place + ")").join(", ") : NO_OWNER[state]) +
      (mark ? ", " + { "↓": "swapped out", "↑": "swapped in", "→": "copied" }[mark] + " in this step" : ""));
  });
  const number = runs ? (pool.onHost ? run.hosted[step] : run.held[step]) : 0;
  const cached = runs && !pool.onHost ? run.cached[step] : 0;
  const text = count(number) + " of " + count(pool.size) + " blocks held" + (shared ? ", " + count(shared) + " of them shared" : "") +
    (cached ? ", " + count(cached) + " free ones keep a cached prefix" : "");
  write(pool.note, text);
  put(pool.map, "aria-label", pool.title + ": " + text + (isCut ? "" : ". " + [...held.slice(0, 32).map((one) => tableText(one)),
    ...(kept.length ? ["cached, no request refers to them: " + some(kept.sort((one, other) => one - other).map(String), MAX_TABLE)] : [])].join("; ")));
}

function tableText(one) {
  return data.ids[one.request] + ": " + (one.lost ? counted(one.lost, "block") + " out of the window, " : "") +
    some(one.blocks.slice(one.lost).map(String), MAX_TABLE);
}

function drawTables(list, held) {
  list.replaceChildren();
  if (!held.length) element(list, "p", "cbr-quiet", "No request holds a block.");
  for (const one of held.slice(0, 64)) {
    const row = element(list, "p", "cbr-table-row");
    chip(row, one.request, one.onHost ? "host" : "").setAttribute("aria-pressed", String(one.request === followed));
    const blocks = one.blocks.slice(one.lost).map((block, place) => (one.lost + place >= one.before ? "+" : "") + block);
    element(row, "span", "cbr-numbers", (one.lost ? "… " : "") + blocks.slice(-40).join(" · "));
  }
  if (held.length > 64) element(list, "p", "cbr-quiet", "and " + count(held.length - 64) + " more tables");
}
