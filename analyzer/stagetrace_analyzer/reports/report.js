"use strict";
// Draws every figure when it comes into view, in the reader's theme; on paper in the light one.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const templates = read("templates");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
    showSendToCloud: false,
  };
  const paperPx = 680;
  const plots = document.querySelectorAll(".plot");
  const drawn = new Map();
  let closed = null; // what was closed before printing; null while nothing is printed

  function draw(plot) {
    if (drawn.has(plot)) return;
    drawn.set(plot, read(plot.dataset.figure));
    show(plot);
  }

  function show(plot) {
    const {data, layout} = drawn.get(plot);
    const template = templates[dark.matches && closed === null ? "dark" : "light"];
    Plotly.react(plot, data, {...layout, template, ...(closed === null ? {} : {width: paperPx})}, config);
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, {rootMargin: "400px"});
  for (const plot of plots) seen.observe(plot);
  const showAll = () => [...drawn.keys()].forEach(show);
  dark.addEventListener("change", showAll);

  // A figure that was drawn anew while it was hidden does not know its width.
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => {
      if (!part.open || closed !== null) return;
      for (const plot of part.querySelectorAll(".plot")) if (drawn.has(plot)) Plotly.Plots.resize(plot);
    });
  }

  addEventListener("beforeprint", () => {
    if (closed !== null) return;
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const part of closed) part.open = true;
    plots.forEach(draw);
    showAll();
  });
  addEventListener("afterprint", () => {
    const parts = closed ?? [];
    closed = null;
    showAll();
    for (const plot of drawn.keys()) Plotly.relayout(plot, {width: null, autosize: true});
    for (const part of parts) part.open = false;
  });
})();
