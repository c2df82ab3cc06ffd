// The first tab: what each request wants, from which seats and which pool.
function buildStart(panel, begin) {
  const [run] = data.runs, work = data.workload;
  const alike = (name) => data.runs.every((other) => other[name] === run[name]);
  const labels = data.runs.map((other) => other.label);
  const intro = element(panel, "p", "cbr-lead");
  const together = work.is_served_by_all ? " serve the same requests on one clock; they differ in when a request may join the batch."
    : work.is_shared ? " are given the same requests on one clock; they differ in when a request may join the batch, and in which requests they reject."
      : " play on one clock; each is given requests of its own.";
  intro.textContent = !work.requests ? "No request was served."
    : counted(work.requests, "request") + " want" + (work.requests === 1 ? "s" : "") + " " +
    counted(work.output, "token") + " from " + (alike("seats") ? counted(run.seats, "seat") : "a few seats") + ". " +
    (labels.length > 1 ? some(labels, 6) + together : labels[0] + " serves them, step by step.");
  const go = named(button(panel, "cbr-button cbr-main cbr-begin", "▶ Play the runs", begin), "begin");
  go.title = "play the runs from the first step";
  const grid = element(panel, "div", "cbr-start");
  const left = element(grid, "section", "cbr-card"), right = element(grid, "section", "cbr-card");
  element(left, "h3", "", "The requests");
  listRequests(left);
  element(right, "h3", "", "The machine");
  const facts = element(right, "dl", "cbr-facts");
  const fact = (title, name, text) => {
    element(facts, "dt", "", title);
    const values = alike(name) ? [text(run)] : data.runs.map((other) => other.label + ": " + text(other));
    element(facts, "dd", "", values.join("\n"));
  };
  fact("seats (slots of the batch)", "seats", (one) => count(one.seats));
  fact("token budget of a step", "budget", (one) => counted(one.budget, "token"));
  fact("KV pool on the device", "blocks", (one) =>
    count(one.blocks) + " blocks × " + one.size + " = " + counted(one.blocks * one.size, "token"));
  if (data.runs.some((one) => one.host)) fact("KV pool on the host", "host", (one) => counted(one.host, "block"));
  if (data.runs.some((one) => one.caching)) fact("prefix caching", "caching", (one) => (one.caching ? "on" : "off"));
  if (data.runs.some((one) => one.window)) fact("sliding window", "window", (one) => one.window ? counted(one.window, "token") : "none");
  picture(right, run);
  const rejections = new Map();
  for (const one of data.runs) {
    if (!one.num_rejected) continue;
    const text = counted(one.num_rejected, "request") + ": " + some(one.rejected.map(([id, why]) => id + " (" + why + ")"), 3);
    rejections.set(text, [...(rejections.get(text) || []), one.label]);
  }
  for (const [text, by] of rejections) {
    const isAll = by.length === data.runs.length && by.length > 1;
    element(right, "p", "cbr-quiet", "Rejected" + (isAll ? "" : " by " + some(by, 6)) + ": " + text);
  }
}

function listRequests(parent) {
  const most = largest(data.requests.map(([, prompt, output]) => (prompt || 0) + output), 1);
  const listed = data.requests.slice(0, 200);
  const later = listed.some(([arrival]) => arrival > 0);
  const body = table(parent, "Requests in order, with the length of prompt and output in tokens",
    ["request", "prompt ▨ and output ■", "prompt", "output", ...(later ? ["arrives"] : [])], 2);
  listed.forEach(([arrival, prompt, output], request) => {
    const cells = tableRow(body, ["", "", count(prompt), count(output), ...(later ? [seconds(arrival)] : [])], 2);
    element(cells[0], "bdi", "", data.ids[request]);
    const bar = element(cells[1], "div", "cbr-length");
    bar.setAttribute("aria-hidden", "true");
    const first = element(bar, "span", "cbr-prompt"), second = element(bar, "span");
    first.style.width = (100 * prompt) / most + "%";
    second.style.width = (100 * output) / most + "%";
    second.style.background = data.fills[data.colors[request]];
  });
  if (data.workload.requests > listed.length) {
    element(parent, "p", "cbr-quiet", "The first " + count(listed.length) + " of " + count(data.workload.requests) + " are listed.");
  }
}

// Seats and blocks, all empty yet.
function picture(parent, run) {
  const figure = element(parent, "div", "cbr-picture");
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", counted(run.seats, "empty seat") + " and a pool of " + counted(run.blocks, "free block"));
  const row = (title, number, most, className) => {
    element(figure, "p", "cbr-quiet", title);
    const cells = element(figure, "div", className);
    for (let place = 0; place < Math.min(number, most); place += 1) element(cells, "span");
    if (number > most) element(cells, "b", "", "+ " + count(number - most));
  };
  row("seats", run.seats, 32, "cbr-mini-seats");
  row("pool, a square a block", run.blocks, 96, "cbr-mini-blocks");
  if (run.host) row("host pool", run.host, 48, "cbr-mini-blocks cbr-mini-host");
}
