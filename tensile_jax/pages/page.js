"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plot = document.getElementById("plot");
  const rows = [...document.querySelectorAll("tbody tr")];
  const rowOf = new Map(rows.map((row) => [Number(row.dataset.row), row]));
  const heads = [...document.querySelectorAll("thead th")];
  const pinned = new Set();
  let found = null; // the rows that the search has found; null: all

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const themed = () => {
    const layout = structuredClone(data.layout);
    layout.font = { ...layout.font, color: colour("--text") };
    layout.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" };
    for (const [name, axis] of Object.entries(layout)) {
      if (/^[xy]axis/.test(name)) Object.assign(axis, { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") });
    }
    return layout;
  };
  const bands = () => plot.data.flatMap((trace, place) => (trace.meta === "bands" ? [place] : []));

  const show = () => {
    const places = bands();
    if (!places.length) return;
    const of = (value) => places.map((place) => plot.data[place].customdata.map(value));
    const line = colour("--text");
    Plotly.restyle(plot, {
      "marker.opacity": of((row) => (found === null || found.has(row) || pinned.has(row) ? 1 : 0.12)),
      "marker.line.width": of((row) => (pinned.has(row) ? 3 : 0.4)),
      "marker.line.color": of((row) => (pinned.has(row) ? line : "rgba(127,127,127,0.35)")),
    }, places);
  };

  const card = (row) => {
    const section = document.createElement("section");
    const cells = [...rowOf.get(row).cells];
    const title = document.createElement("h3");
    title.textContent = cells[0].textContent;
    const list = document.createElement("dl");
    cells.slice(1).forEach((cell, place) => {
      if (!cell.textContent) return;
      const name = document.createElement("dt"), value = document.createElement("dd");
      name.textContent = heads[place + 1].textContent;
      value.textContent = cell.textContent;
      list.append(name, value);
    });
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Unpin";
    button.addEventListener("click", () => pin(row));
    section.append(title, list, button);
    return section;
  };
  const pin = (row) => {
    if (!rowOf.has(row)) return;
    if (!pinned.delete(row)) pinned.add(row);
    rowOf.get(row).toggleAttribute("data-pinned", pinned.has(row));
    document.getElementById("pinned").replaceChildren(...[...pinned].map(card));
    show();
  };

  const search = (text) => {
    const wanted = text.trim().toLowerCase();
    found = wanted === "" ? null : new Set();
    for (const row of rows) {
      const matches = found === null || row.textContent.toLowerCase().includes(wanted);
      row.hidden = !matches;
      if (found !== null && matches) found.add(Number(row.dataset.row));
    }
    document.getElementById("found").textContent = found === null ? "" : `${found.size} of ${rows.length} rows`;
    show();
  };

  const sort = (head) => {
    const column = heads.indexOf(head);
    const rising = head.getAttribute("aria-sort") === "descending" || (head.dataset.kind === "text" && head.ariaSort !== "ascending");
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const compare = head.dataset.kind === "number" ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b));
    rows.sort((a, b) => (rising ? compare(a, b) : compare(b, a)));
    document.querySelector("tbody").append(...rows);
  };

  const zoom = (scale, shift) => {
    const [from, to] = plot.layout.xaxis.range.map(Number);
    const middle = (from + to) / 2 + shift * (to - from), half = ((to - from) / 2) * scale;
    Plotly.relayout(plot, { "xaxis.range": [middle - half, middle + half] });
  };

  document.getElementById("search").addEventListener("input", (event) => search(event.target.value));
  document.getElementById("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && found !== null && found.size) pin([...found][0]);
  });
  for (const [name, scale, shift] of [["in", 0.5, 0], ["out", 2, 0], ["left", 1, -0.25], ["right", 1, 0.25]]) {
    document.getElementById(name).addEventListener("click", () => zoom(scale, shift));
  }
  document.getElementById("all").addEventListener("click", () => Plotly.relayout(plot, { "xaxis.autorange": true }));
  document.querySelector("tbody").addEventListener("click", (event) => {
    if (event.target.closest("button")) pin(Number(event.target.closest("tr").dataset.row));
  });
  heads.forEach((head) => head.addEventListener("click", () => sort(head)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Plotly.react(plot, plot.data, themed()).then(show));

  const options = { responsive: true, displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  Plotly.newPlot(plot, data.traces, themed(), options).then(() => {
    plot.on("plotly_click", ({ points }) => {
      const band = points.find((point) => point.data.meta === "bands");
      if (band) pin(band.customdata);
    });
    document.body.dataset.ready = "true";
  });
})();
