// The third tab: gauges for the moment shown, and lines up to it.
const WIDTH = 300, HEIGHT = 84;
const percent = (value) => short(value) + " %";
const CHARTS = [
  {
    title: "Occupancy", unit: "rows that do useful work",
    value: (run, step) => run.rows[step], most: (run) => run.seats,
    text: (run, step) => count(run.rows[step]) + " of " + count(run.seats),
  },
  {
    title: "Utilization so far", unit: "useful rows, % of all seats in all steps", lasts: true,
    value: (run, step) => run.usedSoFar[step], most: () => 100,
    text: (run, step) => percent(run.usedSoFar[step]),
  },
  {
    title: "Queue", unit: "requests without a seat",
    value: (run, step) => run.waiting[step], most: (run) => largest(run.waiting, 1),
    text: (run, step) => count(run.waiting[step]),
  },
  {
    title: "Throughput so far", unit: "output tokens / s", lasts: true,
    value: (run, step) => run.rate[step], most: (run) => largest(run.rate, 0),
    text: (run, step) => short(run.rate[step]),
  },
  {
    title: "KV memory", unit: "blocks held",
    value: (run, step) => run.held[step], most: (run) => (run.blocks > 3 * run.peak ? run.peak : run.blocks),
    text: (run, step) => count(run.held[step]) + " of " + count(run.blocks),
  },
  {
    title: "Fragmentation", unit: "held slots without a needed token, %",
    value: (run, step) => run.held[step] ? 100 * (1 - run.kv[step] / (run.held[step] * run.size)) : 0, most: () => 100,
    text: (run, step) => percent(run.held[step] ? 100 * (1 - run.kv[step] / (run.held[step] * run.size)) : 0),
    mean: (run, step) => percent(run.emptySoFar[step]),
  },
];

function buildMonitor(panel) {
  const grid = element(panel, "div", "cbr-charts");
  return CHARTS.map((chart) => {
    const card = element(grid, "section", "cbr-card cbr-chart");
    const head = element(card, "h3", "", chart.title);
    element(head, "small", "", chart.unit);
    const most = largest(data.runs.map(chart.most), 1e-12);
    const gauges = data.runs.map((run) => {
      const row = element(card, "div", "cbr-gauge");
      swatch(row, run);
      element(row, "bdi", "", run.label).title = run.label;
      const bar = element(element(row, "span", "cbr-bar"), "span");
      bar.classList.add("cbr-look");
      bar.style.setProperty("--look", run.color);
      const number = element(row, "b");
      return { bar, value: element(number, "span"), mean: chart.mean && element(number, "small") };
    });
    const box = element(card, "div", "cbr-plot");
    element(box, "span", "cbr-axis cbr-top", short(most));
    const svg = drawn(box, "svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none", role: "img" });
    data.runs.forEach((run) => {
      const line = drawn(svg, "path", { d: path(run, chart, most), class: "cbr-line", "stroke-dasharray": run.dash });
      line.style.setProperty("--look", run.color);
    });
    const veil = drawn(svg, "rect", { y: 0, height: HEIGHT, class: "cbr-veil" });
    for (const part of [0, 0.5, 1]) {
      drawn(svg, "line", { x1: 0, x2: WIDTH, y1: 2 + part * (HEIGHT - 4), y2: 2 + part * (HEIGHT - 4), class: "cbr-rule" });
    }
    const now = drawn(svg, "line", { y1: 0, y2: HEIGHT, class: "cbr-now" });
    const axis = element(card, "p", "cbr-axis");
    element(axis, "span", "", "0");
    element(axis, "span", "", seconds(last));
    return { chart, gauges, most, svg, veil, now };
  });
}

function path(run, chart, most) {
  const x = (time) => (last ? (WIDTH * time) / last : 0).toFixed(1);
  const y = (value) => (HEIGHT - 2 - ((HEIGHT - 4) * value) / most).toFixed(1);
  let text = "";
  for (let step = 0; step < run.start.length; step += 1) {
    const begin = x(run.start[step]), level = y(chart.value(run, step));
    if (!step || run.start[step] > run.end[step - 1]) {
      // Nothing is computed in between: what is counted by the moment is nothing there, what lasts stays.
      if (!step) text += "M" + begin + " " + level;
      else text += chart.lasts ? "H" + begin + "V" + level : "V" + y(0) + "H" + begin + "V" + level;
    } else text += "V" + level;
    text += "H" + x(run.end[step]);
  }
  return text || "M0 0";
}

function drawMonitor(charts, time) {
  const at = data.runs.map((run) => moment(run, time));
  for (const { chart, gauges, most, svg, veil, now } of charts) {
    const said = data.runs.map((run, place) => {
      const { step, runs } = at[place];
      const isShown = step >= 0 && (runs || chart.lasts);
      const value = isShown ? chart.value(run, step) : 0;
      const text = isShown ? chart.text(run, step) : step >= 0 && at[place].final ? "done" : "–";
      gauges[place].bar.style.width = Math.min(100, (100 * value) / most) + "%";
      write(gauges[place].value, text);
      if (chart.mean) write(gauges[place].mean, step < 0 ? "" : " so far " + chart.mean(run, step));
      return run.label + " " + text;
    });
    const x = last ? (WIDTH * time) / last : 0;
    put(veil, "x", String(x));
    put(veil, "width", String(WIDTH - x + 1));
    put(now, "x1", String(x));
    put(now, "x2", String(x));
    put(svg, "aria-label", chart.title + " (" + chart.unit + ") up to " + seconds(time) + ": " + said.join(", "));
  }
}
