// What pages are made of beside Dash's components; elements.py has their properties.
(() => {
  "use strict";

  const h = React.createElement;
  const OWN = "stagetrace_dashboard";
  const PENDING = "st-pending";

  // --- what no callback reaches ---------------------------------------------------------------------

  const isComponent = (node) => node !== null && typeof node === "object" && "namespace" in node;

  /** Make elements of components as they come from the server, without what Dash puts around each. */
  function drawn(node) {
    if (Array.isArray(node)) return h(React.Fragment, null, ...node.map(drawn));
    if (!isComponent(node)) return node;
    const { children, ...properties } = node.props;
    const inside = [children ?? []].flat().map(drawn);
    if (node.namespace === "dash_html_components") return h(node.type.toLowerCase(), properties, ...inside);
    return h(window[node.namespace][node.type], { key: properties.name, setProps: ignore, ...properties }, ...inside);
  }
  const ignore = () => {};

  const Static = React.memo(
    ({ content }) => drawn(content),
    (before, after) => before.content === after.content,
  );

  function Link({ text, href, stays }) {
    const open = (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      history.pushState({}, "", href);
      dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      follow();
      if (!stays) scrollTo(0, 0);
    };
    return h("a", { href, className: "st-link", onClick: open }, drawn(text));
  }

  function Table({ columns, rows, facts }) {
    const look = columns.map(([, isFigure]) => (isFigure ? "st-figure" : "st-wrap"));
    const titles = h("tr", null, ...columns.map(([title], i) => h("th", { className: look[i] }, title)));
    const cell = (value, i) => h(facts && i === 0 ? "th" : "td", { className: look[i] }, drawn(value));
    return h(
      "div",
      { className: "st-scroll" },
      h(
        "table",
        { className: facts ? "st-table st-facts" : "st-table" },
        !facts && h("thead", null, titles),
        h("tbody", null, ...rows.map((cells) => h("tr", null, ...cells.map(cell)))),
      ),
    );
  }

  // --- the control that somebody is at --------------------------------------------------------------

  // A page is made anew whenever it changes, and so are its controls: one can go on where one was.
  let focused = "";
  addEventListener("focusin", ({ target }) => {
    // A list that one can search would open.
    const opens = target.matches("[aria-haspopup]:not([readonly])");
    focused = target.closest("[role=search]") && !opens ? target.id : "";
    if (focused) anew.observe(document.getElementById("page"), { childList: true });
  });
  addEventListener("pointerdown", () => (focused = ""));
  const anew = new MutationObserver(() => {
    if (document.activeElement === document.body) document.getElementById(focused)?.focus({ preventScroll: true });
  });

  // --- scripts that not every page needs ---------------------------------------------------------------

  const loading = {};

  /** Load a script once; its address stands in the page. */
  function loaded(name) {
    loading[name] ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = document.querySelector(`link[data-script="${name}"]`).href;
      script.onload = () => resolve(true);
      script.onerror = reject;
      document.head.append(script);
    });
    return loading[name];
  }

  if (location.pathname === "/requests") loaded("grid");
  if (["/", "/class", "/engine"].includes(location.pathname)) loaded("plotly");
  /** The grid: its script is larger than all others, and one page needs it. */
  function Grid(properties) {
    const [element, setElement] = React.useState(null);
    React.useEffect(() => void grid().then((found) => setElement(() => found)), []);
    return element && h(element, properties);
  }
  Grid.dashRenderType = true;

  // It stays in the place of the script's own: Dash would take another component for another grid.
  const gridNames = { AgGrid: Grid };
  let ofScript = null;
  Object.defineProperty(window, "dash_ag_grid", {
    get: () => gridNames,
    set: (names) => {
      ofScript ??= names.AgGrid;
      Object.assign(gridNames, names, { AgGrid: Grid });
    },
  });
  const grid = () => loaded("grid").then(() => ofScript);

  /** Sort and select rows as the address says, after it has changed by other means than the grid. */
  function follow() {
    const place = document.getElementById("requests-grid");
    if (!place || location.pathname !== "/requests" || !gridNames.getApi) return;
    const api = gridNames.getApi("requests-grid");
    const chosen = new URLSearchParams(location.search);
    const wanted = [chosen.get("sort") ?? "received_unix_ns", chosen.get("descending") === "1" ? "desc" : "asc"];
    const now = api.getColumnState().find(({ sort }) => sort) ?? { colId: "received_unix_ns", sort: "asc" };
    if (now.colId !== wanted[0] || now.sort !== wanted[1]) {
      const state = [{ colId: wanted[0], sort: wanted[1] }];
      api.applyColumnState({ state, defaultState: { sort: null } });
    }
    const keys = chosen.get("requests")?.split(",") ?? [];
    const selected = api.getSelectedNodes();
    if (selected.length === keys.length && selected.every(({ id }) => keys.includes(id))) return;
    api.deselectAll();
    const nodes = keys.map((key) => api.getRowNode(key));
    // The list tells which rows are selected, and must not tell of fewer than the address has.
    if (nodes.every(Boolean)) api.setNodesSelected({ nodes, newValue: true });
  }
  addEventListener("popstate", follow);

  /** Load what the next page may need when there has been nothing else to do for a while. */
  const later = (load) => new Promise((resolve) => requestIdleCallback(() => resolve(load())));
  addEventListener("load", () =>
    setTimeout(() => later(() => loaded("plotly")).then(() => later(grid)), 2000),
  );

  // --- figures --------------------------------------------------------------------------------------

  // Figures that are not drawn yet: one is drawn when it comes into the window, the others one by one
  // when there is nothing else to do.
  const waiting = new Set();
  let isScheduled = false;

  function schedule() {
    if (isScheduled || !waiting.size) return;
    isScheduled = true;
    requestIdleCallback(async () => {
      const [graph] = waiting;
      if (graph) await graph.draw();
      isScheduled = false;
      schedule();
    });
  }

  const inWindow = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) target.graph.draw();
    schedule();
  });
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) target.graph.fit();
  });
  const graphs = () => [...document.querySelectorAll(".st-graph")].map((place) => place.graph);
  addEventListener("beforeprint", () => graphs().forEach((graph) => graph.drawForPaper()));
  addEventListener("afterprint", () => graphs().forEach((graph) => graph.fit()));

  // A card's room on upright A4 or Letter; how wide paper is, nobody is told before it is printed on.
  const PAPER_PX = 670;

  /** Return how much larger than usual texts are on this screen. */
  const scale = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;

  /** Return a part of a layout with its texts, and the room for them, larger by a factor. */
  function enlarged(part, factor, name = "") {
    if (Array.isArray(part)) return part.map((item) => enlarged(item, factor));
    if (typeof part === "number") return ENLARGED.test(name) ? part * factor : part;
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(
      Object.entries(part).map(([key, value]) => [key, enlarged(value, factor, `${name}.${key}`)]),
    );
  }
  const ENLARGED = /^\.height$|^\.margin\.|font\.size$|standoff$|yshift$|uniformtext\.minsize$/;

  class Graph extends React.Component {
    constructor(properties) {
      super(properties);
      this.place = React.createRef();
    }

    componentDidMount() {
      this.place.current.graph = this;
      this.wait();
    }

    shouldComponentUpdate(next) {
      return next.figure !== this.props.figure;
    }

    componentDidUpdate() {
      this.wait();
    }

    componentWillUnmount() {
      const place = this.place.current;
      waiting.delete(this);
      inWindow.unobserve(place);
      sizes.unobserve(place);
      if (place.data) Plotly.purge(place);
    }

    wait() {
      const place = this.place.current;
      place.classList.add(PENDING);
      waiting.add(this);
      const { top, bottom } = place.getBoundingClientRect();
      if (bottom > 0 && top < innerHeight) {
        this.draw();
      } else {
        inWindow.unobserve(place);
        inWindow.observe(place);
      }
    }

    /** Draw it, if it is not drawn or being drawn. */
    draw() {
      if (waiting.delete(this)) this.drawing = this.drawNow();
      return this.drawing;
    }

    async drawNow() {
      const place = this.place.current;
      inWindow.unobserve(place);
      await loaded("plotly");
      if (!place.isConnected) return;
      const { data, layout } = this.props.figure;
      const isFirst = !place.data;
      // Plotly writes into what it is given.
      await Plotly.react(
        place,
        data.map((trace) => ({ ...trace })),
        enlarged(layout, scale()),
        this.props.config,
      );
      if (!place.isConnected) return;
      if (isFirst) {
        place.on("plotly_relayout", (change) => this.tell("time", change));
        place.on("plotly_click", ({ points }) => this.tell("bar", { y: points[0].y }));
        this.width = place.offsetWidth;
        sizes.observe(place);
      }
      place.classList.remove(PENDING);
    }

    async drawForPaper() {
      await this.draw();
      if (this.width <= PAPER_PX) return;
      this.width = PAPER_PX;
      Plotly.relayout(this.place.current, { width: PAPER_PX });
    }

    /** Follow the width of the page. */
    fit() {
      const width = this.place.current.offsetWidth;
      if (!width || width === this.width) return;
      this.width = width;
      Plotly.relayout(this.place.current, { autosize: true, width: null });
    }

    /** Tell what was pointed at, if this figure is asked for that. */
    tell(kind, value) {
      if (this.props.tells !== kind || value.autosize) return;
      dash_clientside.set_props("pointed", { data: { kind, value, at: Date.now() } });
    }

    render() {
      const { name, figure } = this.props;
      const height = figure.layout.height * scale();
      return h("div", { ref: this.place, className: "st-graph", "data-graph": name, style: { height } });
    }
  }

  /** Buttons that save a figure as a picture. */
  function Pictures({ graph }) {
    const save = async (format) => {
      const place = document.querySelector(`[data-graph="${graph}"]`);
      await place.graph.draw();
      const { offsetWidth: width, offsetHeight: height } = place;
      Plotly.downloadImage(place, { format, filename: graph, width, height, scale: 2 });
    };
    const button = (format) =>
      h(
        "button",
        { className: "st-button", "aria-label": `save as ${format}`, onClick: () => save(format.toLowerCase()) },
        format,
      );
    return h(React.Fragment, null, button("PNG"), button("SVG"));
  }

  window[OWN] = { Graph, Link, Pictures, Static, Table };
})();
