// The last tab: the result.
function buildComplete(panel) {
  const heroes = element(panel, "div", "cbr-heroes");
  const hero = (value, text, notes) => {
    const card = element(heroes, "div", "cbr-card cbr-hero");
    element(card, "b", "", value);
    element(card, "span", "", text);
    notes.forEach((note) => element(card, "small", "", note));
  };
  // With several comparisons the table below says which one a prediction is of.
  const predicted = data.speedups.length === 1 ? data.predictions.filter(([quantity]) => /^speed-?up/i.test(quantity)) : [];
  for (const [label, baseline, ratio] of data.speedups) {
    hero(ratio + "×", label + " against " + baseline + ", measured in output tokens per second",
      predicted.map(([quantity, value, , error]) =>
        "predicted " + value + "× (" + quantity.replace(/^speed-?up,? */i, "") + "), error " + error));
  }
  if (!data.speedups.length) data.runs.forEach((run) => hero(spoken(run.duration), "for " + counted(run.tokens, "output token"), [run.label]));
  const bars = element(panel, "section", "cbr-card");
  element(bars, "h3", "", "Time to the last token");
  for (const run of data.runs) {
    const row = element(bars, "div", "cbr-gauge cbr-wide");
    swatch(row, run);
    element(row, "bdi", "", run.label);
    const bar = element(element(row, "span", "cbr-bar"), "span");
    bar.classList.add("cbr-look");
    bar.style.setProperty("--look", run.color);
    bar.style.width = (longest ? (100 * run.duration) / longest : 0) + "%";
    element(row, "b", "", spoken(run.duration) + ", " + counted(run.steps, "step"));
  }
  const kpi = element(panel, "section", "cbr-card");
  const body = table(kpi, "Key figures of the whole runs; “–” is what a run does not define, n the sample behind a percentile",
    ["quantity", "unit", ...data.runs.map((run) => run.label)], 2);
  for (const [name, unit, values, sizes] of data.kpi) {
    const cells = tableRow(body, [name, unit, ...values], 2);
    sizes.forEach((size, place) => element(cells[place + 2], "small", "", " n = " + size));
  }
  if (!data.predictions.length) return;
  const beside = element(panel, "section", "cbr-card");
  const rows = table(beside, "Predicted by the formulas, and measured; error = (measured − predicted) / predicted",
    ["quantity", "predicted", "measured", "error"], 1);
  data.predictions.forEach((row) => tableRow(rows, row, 1));
}

function spoken(duration) {
  const [factor, unit] = scaleOf(duration);
  return short(duration * factor) + " " + unit;
}
