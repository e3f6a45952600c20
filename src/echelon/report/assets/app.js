"use strict";
/* Draws the page from the data that stands in it. Texts of a run are only ever written as text nodes. */
(() => {
  const COLOURS = ["#2f6fe4", "#e07b00", "#0d9668", "#d6409f", "#7c5ce0", "#0891b2", "#a16207", "#64748b"];
  const KINDS = {
    forward: "#3b82f6", backward: "#f59e0b", "backward input": "#f59e0b", "backward weight": "#fbbf24",
    update: "#10b981", reduce: "#c084fc", norm: "#a78bfa", tie: "#a78bfa", publish: "#6366f1",
    gather: "#14b8a6", free: "#99a3b3", "send activation": "#22d3ee", "recv activation": "#94a3b8",
    "send gradient": "#22d3ee", "recv gradient": "#94a3b8", store: "#ec4899", fetch: "#f472b6",
    stash: "#a3a3a3", pop: "#a3a3a3",
  };
  const AXES = { data: "#7c3aed", tensor: "#ef4444", pipeline: "#06b6d4", context: "#84cc16", expert: "#ec4899" };
  const PARTS = { compute: "#3b82f6", optimizer: "#10b981", pipeline: "#06b6d4", data: "#8b5cf6", tensor: "#ef4444",
    context: "#84cc16", expert: "#ec4899", "all ranks": "#6366f1", exposed: "#8b5cf6", other: "#94a3b8", idle: "#cbd5e1" };
  const MEMORY = { parameters: "#3b82f6", gradients: "#f59e0b", optimizer: "#10b981", activations: "#8b5cf6",
    buffers: "#94a3b8", temporary: "#ec4899" };
  const MARKS = { checkpoint: "#10b981", restart: "#ef4444", resume: "#06b6d4", rollback: "#f59e0b", skipped: "#ec4899",
    note: "#94a3b8" };

  const state = { smoothing: 0.6, log: false, charts: [], data: null };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /* --- small tools --- */
  const el = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "style") Object.assign(node.style, value);
      else if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  };
  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
  const digits = (value, most = 4) => {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size && (size >= 1e7 || size < 1e-4)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(most)));
  };
  const seconds = (value) => {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3) return digits(value * 1e6, 3) + " µs";
    if (size < 1) return digits(value * 1e3, 3) + " ms";
    return digits(value, 3) + " s";
  };
  const bytes = (value) => {
    if (!known(value)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let place = 0, size = value;
    while (Math.abs(size) >= 1024 && place < units.length - 1) { size /= 1024; place += 1; }
    return (place ? size.toFixed(size < 10 ? 2 : 1) : String(Math.round(size))) + " " + units[place];
  };
  const percent = (value, places = 0) => (known(value) ? (100 * value).toFixed(places) + " %" : "–");
  const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const section = (title, controls, ...children) =>
    el("section", {}, el("div", { class: "title" }, el("h2", {}, title), controls || ""), ...children);
  const table = (heads, rows) => {
    const cell = (tag, value, head) => {
      const wide = head.endsWith("|");
      const node = value instanceof Node ? value : document.createTextNode(value === null || value === undefined ? "–" : String(value));
      return el(tag, { class: wide ? "num" : "break" }, node);
    };
    return el("div", { class: rows.length > 20 ? "scroll tall" : "scroll" }, el("table", { class: "data" },
      el("thead", {}, el("tr", {}, heads.map((head) => cell("th", head.replace("|", ""), head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, place) => cell("td", value, heads[place])))))));
  };
  const keys = (pairs) => el("div", { class: "keys" }, pairs.map(([name, colour]) =>
    el("span", { class: "key" }, el("i", { style: { background: colour } }), name)));

  /* --- curves --- */
  const smooth = (y, weight) => {
    let mean = null;
    return y.map((value) => {
      if (!known(value)) return null;
      mean = mean === null ? value : weight * mean + (1 - weight) * value;
      return mean;
    });
  };
  const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const withAlpha = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  function joined(curves) {
    const tables = curves.map((curve) => [curve.x, curve.y]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    let last = -1e9;
    for (const mark of marks) {
      if (!known(mark.step)) continue;
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width || (mark.kind === "checkpoint" && x - last < 14)) continue;
      if (mark.kind === "checkpoint") last = x;
      ctx.strokeStyle = withAlpha(MARKS[mark.kind] || MARKS.note, mark.kind === "checkpoint" ? 0.35 : 0.9);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  }

  /* curves: [{label, x, y, colour, smoothed, points}] */
  function chart(parent, title, about, curves, show, options = {}) {
    curves = curves.filter((curve) => curve.x && curve.x.length);
    if (!curves.length) return;
    const box = el("div", { class: "plot" });
    parent.append(el("div", { class: "chart" + (options.wide ? " wide" : ""), "data-chart": title },
      el("h3", {}, title, about ? el("span", { class: "quiet" }, "  " + about) : ""), box));
    const build = () => {
      box.replaceChildren();
      const shown = [];
      for (const curve of curves) {
        if (curve.smoothed && state.smoothing > 0) {
          shown.push({ ...curve, label: "", colour: withAlpha(curve.colour, 0.25) });
          shown.push({ ...curve, y: smooth(curve.y, state.smoothing) });
        } else shown.push(curve);
      }
      const positive = shown.some((curve) => curve.y.some((value) => value > 0));
      const log = Boolean(options.log && state.log && positive);
      const tables = shown.map((curve) => ({ x: curve.x, y: log ? curve.y.map((v) => (v > 0 ? v : null)) : curve.y }));
      const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      const plot = new uPlot({
        width: box.clientWidth || 400, height: box.clientHeight - 24,
        padding: [8, 20, 0, 0],
        cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 } },
        legend: { live: true },
        scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: options.range || undefined } },
        axes: [{ ...axis, size: 28, incrs: WHOLE, values: (_, ticks) => ticks.map((t) => (t >= 10000 ? t / 1000 + "k" : t)) },
          { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(tick))) }],
        series: [{ label: "step" }, ...shown.map((curve) => ({
          label: curve.label || "raw", class: curve.label ? null : "raw", stroke: curve.colour, width: curve.label ? 1.7 : 1, spanGaps: true,
          points: { show: Boolean(curve.points), size: 5, fill: curve.colour }, value: (_, value) => show(value),
        }))],
        hooks: { draw: [(plot) => drawMarks(plot, options.marks || [])] },
      }, joined(tables), box);
      return plot;
    };
    const entry = { build, box, plot: build() };
    state.charts.push(entry);
  }
  const redraw = () => state.charts.forEach((entry) => { entry.plot.destroy(); entry.plot = entry.build(); });

  function curves(runs) {
    const several = runs.length > 1;
    const colour = (run, place = 0) => COLOURS[(several ? runs.indexOf(run) : place) % COLOURS.length];
    const label = (run, name) => (several ? run.name : name);
    const marks = several ? [] : runs[0].marks;
    const grid = el("div", { class: "charts" });
    const of = (name, text, options = {}) => runs.filter((run) => run.series[name]).map((run) =>
      ({ ...run.series[name], label: label(run, text), colour: colour(run, options.place), smoothed: options.smoothed, points: options.points }));
    const controls = el("div", { class: "controls" },
      el("label", {}, "smoothing", el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smoothing, id: "smoothing",
        oninput: (event) => { state.smoothing = Number(event.target.value); redraw(); } })),
      el("label", {}, el("input", { type: "checkbox", id: "log", ...(state.log ? { checked: "" } : {}), onchange: (event) => { state.log = event.target.checked; redraw(); } }), "log scale"),
      el("span", {}, "drag to zoom, double-click to go back"));
    const whole = section("Curves", controls, grid);
    requestAnimationFrame(() => {
      const validation = of("validation_loss", "validation", { place: 1, points: true }).map((curve) =>
        ({ ...curve, label: several ? curve.label + ", validation" : curve.label, colour: several ? withAlpha(curve.colour, 0.6) : curve.colour }));
      const unit = runs[0].unit;
      chart(grid, "Loss", "", [...of("loss", "training", { smoothed: true }), ...validation], (v) => digits(v), { wide: true, log: true, marks });
      chart(grid, "Learning rate", "", of("learning_rate", "rate", { place: 2 }), (v) => digits(v, 3), { marks });
      chart(grid, "Gradient norm", "before clipping", of("grad_norm", "norm", { smoothed: true, place: 3 }), (v) => digits(v, 3), { log: true, marks });
      chart(grid, unit + "/s", "", of("rate", unit + "/s", { smoothed: true, place: 0 }), (v) => digits(v, 3), { marks });
      chart(grid, "Step", "seconds", of("seconds", "step", { smoothed: true, place: 4 }), seconds, { log: true, marks });
      chart(grid, "Communication that nothing hides", "per step", of("exposed", "exposed", { smoothed: true, place: 1 }), seconds, { log: true, marks });
      chart(grid, "Accuracy", "of validation", of("accuracy", "accuracy", { place: 2, points: true }), (v) => percent(v, 1), { marks });
      chart(grid, "Loss scale", "", of("loss_scale", "scale", { place: 5 }), (v) => digits(v, 3), { log: true, marks });
      chart(grid, "Busiest expert", "× its fair share", of("busiest", "share", { smoothed: true, place: 6 }), (v) => digits(v, 3), { marks });
      const kinds = [...new Set(marks.filter((mark) => known(mark.step)).map((mark) => mark.kind))];
      if (kinds.length) grid.after(keys(kinds.map((kind) => [kind, MARKS[kind] || MARKS.note])));
    });
    return whole;
  }

  /* --- predicted beside measured --- */
  const ratio = (predicted, measured) => {
    if (!known(predicted) || !known(measured) || !measured) return "";
    const off = predicted / measured - 1;
    return el("span", { class: Math.abs(off) <= 0.1 ? "good" : "quiet" }, (off >= 0 ? "+" : "−") + percent(Math.abs(off)));
  };
  const barPair = (predicted, measured, most, colour) => el("div", { class: "bars" },
    known(predicted) ? el("div", { class: "bar predicted", style: { width: Math.max(0.5, 100 * predicted / most) + "%" } }) : "",
    known(measured) ? el("div", { class: "bar", style: { width: Math.max(0.5, 100 * measured / most) + "%", background: colour } }) : "");

  function partsSection(run) {
    const rows = run.parts.rows;
    if (!rows.length) return null;
    const most = Math.max(...rows.flatMap((row) => [row.predicted || 0, row.measured || 0])) || 1;
    const sum = (name) => (rows.some((row) => known(row[name])) ? rows.reduce((total, row) => total + (row[name] || 0), 0) : null);
    const body = [...rows.map((row) => [row.part, seconds(row.predicted), seconds(row.measured), barPair(row.predicted, row.measured, most, PARTS[row.part] || COLOURS[0])]),
      [el("b", {}, "together"), seconds(sum("predicted")), seconds(sum("measured")), ""]];
    const source = run.parts.source === "trace" ? "measured: mean over the ranks and steps of the trace; what runs behind computation is in no part"
      : "measured: from the metrics of rank 0; a trace has more parts (train with --set trace=10:13)";
    return section("A step, by part", null, table(["part", "predicted|", "measured|", ""], body), el("p", { class: "note" }, source));
  }

  function memorySection(run) {
    const { ranks, predicted, categories } = run.memory;
    if (!ranks.length && !predicted.length) return null;
    const first = ranks[0], stage = predicted.find((row) => first && row.stage === first.stage) || predicted[0];
    const names = [...categories, ...(stage && stage.temporary ? ["temporary"] : [])];
    const most = Math.max(1, ...names.flatMap((name) => [(first && first.peak[name]) || 0, (stage && stage[name]) || 0]));
    const rows = names.map((name) => {
      const own = first && known(first.peak[name]) ? first.peak[name] : null, foreseen = stage ? stage[name] : null;
      return [name, bytes(foreseen), own === null ? "not metered" : bytes(own), ratio(foreseen, own), barPair(foreseen, own, most, MEMORY[name])];
    });
    const metered = stage ? stage.peak - stage.temporary : null;
    rows.push([el("b", {}, "peak of all at once"), bytes(metered), first ? bytes(first.total) : "–", first ? ratio(metered, first.total) : "", ""]);
    const largest = Math.max(1, ...ranks.map((rank) => rank.total || 0));
    const perRank = ranks.slice(0, 64).map((rank) => el("div", {}, el("div", { class: "quiet" }, `rank ${rank.rank}, stage ${rank.stage}: ${bytes(rank.total)}` + (rank.host ? `, and ${bytes(rank.host)} in host memory` : "")),
      el("div", { class: "stack", style: { width: 100 * (rank.total || 0) / largest + "%" } }, categories.map((name) =>
        el("span", { title: `${name}: ${bytes(rank.peak[name])}`, style: { background: MEMORY[name], width: 100 * (rank.peak[name] || 0) / Math.max(1, categories.reduce((sum, each) => sum + (rank.peak[each] || 0), 0)) + "%" } })))));
    return section("Memory", null, el("div", { class: "two" },
      el("div", {}, el("h3", {}, "Rank 0, each category at its peak"), table(["category", "predicted|", "measured|", "off by|", ""], rows)),
      el("div", {}, el("h3", {}, "Every rank"), el("div", { class: "tall" }, ...perRank), keys(categories.map((name) => [name, MEMORY[name]])))));
  }

  function bytesSection(run) {
    if (!run.bytes.length) return null;
    const rows = run.bytes.map((row) => {
      const equal = row.predicted === row.measured;
      const word = !known(row.predicted) || !known(row.measured) ? "" : equal ? el("span", { class: "good" }, "equal") : el("span", { class: "warn" }, bytes(row.measured - row.predicted));
      return [row.axis, row.operation.replaceAll("_", " "), row.subject, bytes(row.predicted), bytes(row.measured), word];
    });
    const sum = (name) => run.bytes.reduce((total, row) => total + (row[name] || 0), 0);
    rows.push([el("b", {}, "together"), "", "", run.bytes.some((row) => known(row.predicted)) ? bytes(sum("predicted")) : "–", bytes(sum("measured")), ""]);
    return section("Bytes that rank 0 sends in a step", null, table(["axis", "operation", "subject", "predicted|", "measured|", "difference|"], rows),
      el("p", { class: "note" }, "Predicted by a dry run of the engine, which compares no gradients with one device: what an audit sends is measured alone."));
  }

  /* --- the trace --- */
  const MISC = { "waiting for a stage": "#94a3b8", "inside other instructions": "#cbd5e1", "before and after instructions": "#e2e8f0" };
  function analysisSection(run) {
    const found = run.analysis;
    if (!found || !found.ranks.length) return null;
    const rows = found.ranks.slice(0, 64).map((rank) => [
      `rank ${rank.rank}` + (rank.rank === found.slowest && found.slowdown > 1.02 ? " (slowest)" : ""), seconds(rank.step), seconds(rank.compute), seconds(rank.exposed), seconds(rank.idle),
      percent(rank.overlap),
      el("div", { class: "stack bars" }, [["compute", rank.compute], ["exposed", rank.exposed], ["idle", rank.idle]].map(([name, value]) =>
        el("span", { title: `${name}: ${seconds(value)}`, style: { background: PARTS[name], width: 100 * value / rank.step + "%" } })))]);
    const straggler = found.slowdown > 1.02 ? `Rank ${found.slowest} computes ${percent(found.slowdown - 1, 1)} longer than the median rank.` : "No rank computes more than 2 % longer than the median rank.";
    const causes = {};
    for (const rank of found.ranks) for (const [cause, value] of Object.entries(rank.idle_by)) causes[cause] = (causes[cause] || 0) + value / found.ranks.length;
    const kinds = {};
    for (const part of found.path) kinds[part.kind] = (kinds[part.kind] || 0) + part.seconds;
    const hops = found.path.filter((part, place) => place && part.rank !== found.path[place - 1].rank).length;
    const pathRows = Object.entries(kinds).sort((a, b) => b[1] - a[1]).map(([kind, value]) => [kind, seconds(value), percent(value / found.path_seconds, 1)]);
    return section("Where the time goes", null,
      table(["", "step|", "computes|", "communicates only|", "idle|", "overlap|", ""], rows),
      keys([["compute", PARTS.compute], ["communication that nothing hides", PARTS.exposed], ["idle", PARTS.idle]]),
      el("p", { class: "note" }, straggler + " Overlap: the part of communication that runs behind computation."),
      el("div", { class: "two", style: { marginTop: "14px" } },
        el("div", {}, el("h3", {}, `Critical path of step ${found.path_step}: ${seconds(found.path_seconds)}, ${counted(hops, "change")} of rank`), table(["instruction", "seconds|", "part|"], pathRows)),
        el("div", {}, el("h3", {}, "Idle time by place, mean of ranks"), table(["where", "seconds|"], Object.entries(causes).sort((a, b) => b[1] - a[1]).map(([cause, value]) => [cause, seconds(value)])))));
  }

  function deviceSection(run) {
    if (!run.devices.length) return null;
    const cause = (rank, name) => seconds(rank.idle_by[name] || 0);
    const rows = run.devices.map((rank) => [`rank ${rank.rank}`, seconds(rank.window), percent(rank.compute / rank.window, 1), percent(rank.exposed / rank.window, 1),
      percent(rank.idle / rank.window, 1), percent(rank.overlap, 1), cause(rank, "the host"), cause(rank, "other streams"), cause(rank, "between kernels")]);
    return section("What the GPU streams did", null,
      table(["", "window|", "computes|", "communicates or copies only|", "idle|", "overlap|", "waits for the host|", "for other streams|", "between kernels|"], rows),
      el("p", { class: "note" }, "From traces of torch.profiler. The last three columns are of the stream that computes most."));
  }

  const tip = el("div", { class: "tip", role: "tooltip" });
  const sliceColour = (kind) => (kind.startsWith("communication: ") ? AXES[kind.slice(15)] || "#64748b" : KINDS[kind] || "#64748b");

  function timelineSection(run) {
    const data = run.timeline;
    if (!data) return null;
    const holder = el("div", { class: "lane", "data-timeline": "" }), canvas = el("canvas", { tabindex: 0, "aria-label": "timeline" });
    holder.append(canvas);
    let step = data.steps[Math.floor(data.steps.length / 2)], view = [0, 1], rows = [];
    const choose = el("select", { "aria-label": "step", onchange: (event) => { step = data.steps[Number(event.target.value)]; reset(); } },
      data.steps.map((each, place) => el("option", { value: place, ...(each === step ? { selected: "" } : {}) }, `step ${each.step}`)));
    const zoom = (factor, at = 0.5) => {
      const [begin, end] = view, middle = begin + at * (end - begin), width = Math.min(total(), Math.max(2e-6, (end - begin) * factor));
      const start = Math.min(Math.max(0, middle - at * width), total() - width);
      view = [start, start + width]; draw();
    };
    const total = () => Math.max(step.seconds, data.simulated ? data.simulated.seconds : 0) * 1.02;
    const controls = el("div", { class: "controls" }, choose,
      el("button", { onclick: () => zoom(0.5), "aria-label": "zoom in" }, "+"), el("button", { onclick: () => zoom(2), "aria-label": "zoom out" }, "−"),
      el("button", { onclick: () => reset() }, "whole step"), el("span", {}, "wheel or pinch with Ctrl to zoom, drag to move"));
    const layout = () => {
      rows = []; let y = 0;
      const add = (heading, source) => {
        rows.push({ y, height: 20, heading }); y += 20;
        for (const row of source) {
          const height = row.track === "" ? (source.length > 24 ? 13 : 20) : 9;
          rows.push({ y, height, row }); y += height + (row.track === "" ? 2 : 1);
        }
        y += 6;
      };
      add(`measured, ${seconds(step.seconds)}`, step.rows);
      if (data.simulated) add(`the same program simulated with these costs: ${seconds(data.simulated.seconds)}, bubble ${percent(data.simulated.bubble, 1)}`, data.simulated.rows);
      return y + 18;
    };
    const LEFT = 74;
    const draw = () => {
      const width = holder.clientWidth, height = layout(), scale = devicePixelRatio || 1, ctx = canvas.getContext("2d");
      canvas.width = width * scale; canvas.height = height * scale; canvas.style.width = width + "px"; canvas.style.height = height + "px";
      ctx.scale(scale, scale); ctx.fillStyle = css("--card"); ctx.fillRect(0, 0, width, height);
      const [begin, end] = view.map((second) => second * 1e6), span = end - begin, px = (width - LEFT) / span;
      ctx.font = "11px system-ui"; ctx.textBaseline = "middle";
      const ink = css("--ink"), quiet = css("--quiet"), line = css("--line");
      const unit = 10 ** Math.floor(Math.log10(span / 4)), most = Math.max(2, (width - LEFT) / 90), every = [1, 2, 5, 10, 20, 50].map((n) => n * unit).find((n) => span / n <= most);
      ctx.strokeStyle = line; ctx.fillStyle = quiet; ctx.textAlign = "center";
      for (let tick = Math.ceil(begin / every) * every; tick <= end; tick += every) {
        const x = LEFT + (tick - begin) * px;
        ctx.beginPath(); ctx.moveTo(x, 0); ctx.lineTo(x, height - 16); ctx.stroke();
        if (x > LEFT + 14 && x < width - 22) ctx.fillText(seconds(tick / 1e6), x, height - 8);
      }
      ctx.textAlign = "left";
      for (const { y, height: tall, row, heading } of rows) {
        if (heading) { ctx.fillStyle = css("--card"); ctx.fillRect(0, y, width, tall); ctx.fillStyle = ink; ctx.font = "600 11px system-ui"; ctx.fillText(heading, 6, y + tall / 2); ctx.font = "11px system-ui"; continue; }
        ctx.fillStyle = quiet;
        if (row.track === "") ctx.fillText(`rank ${row.rank}`, 6, y + tall / 2);
        else { ctx.font = "9px system-ui"; ctx.fillText(row.track.slice(0, 10), 18, y + tall / 2); ctx.font = "11px system-ui"; }
        for (let at = 0; at < row.slices.length; at += 4) {
          const start = row.slices[at + 2], length = row.slices[at + 3];
          if (start > end || start + length < begin) continue;
          const x = Math.max(LEFT, LEFT + (start - begin) * px), stop = Math.min(width, LEFT + (start + length - begin) * px);
          ctx.fillStyle = sliceColour(data.kinds[row.slices[at + 1]]);
          ctx.fillRect(x, y, Math.max(0.7, stop - x - (stop - x > 3 ? 0.6 : 0)), tall);
          if (row.track === "" && tall > 14 && stop - x > 26) {
            const name = data.names[row.slices[at]];
            if (ctx.measureText(name).width < stop - x - 6) { ctx.fillStyle = "#fff"; ctx.fillText(name, x + 4, y + tall / 2 + 0.5); }
          }
        }
      }
    };
    const reset = () => { view = [0, total()]; draw(); };
    const at = (event) => {
      const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      return { x, y, part: (x - LEFT) / (box.width - LEFT), second: view[0] + ((x - LEFT) / (box.width - LEFT)) * (view[1] - view[0]) };
    };
    const hover = (event) => {
      const { x, y, second } = at(event), now = second * 1e6;
      const found = x > LEFT ? rows.find((each) => each.row && y >= each.y && y < each.y + each.height) : null;
      const slices = found ? found.row.slices : [], margin = ((view[1] - view[0]) * 1e6) / 600;
      let best = -1;
      for (let place = 0; place < slices.length; place += 4)
        if (slices[place + 2] - margin <= now && now <= slices[place + 2] + slices[place + 3] + margin && (best < 0 || slices[place + 3] < slices[best + 3])) best = place;
      tip.style.display = best < 0 ? "none" : "block";
      if (best < 0) return;
      tip.replaceChildren(el("b", {}, data.names[slices[best]]), el("br"), `${data.kinds[slices[best + 1]]}, rank ${found.row.rank}`, el("br"), `${seconds(slices[best + 3] / 1e6)}, from ${seconds(slices[best + 2] / 1e6)}`);
      tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px"; tip.style.top = event.clientY + 14 + "px";
    };
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, view }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { hover(event); return; }
      const width = drag.view[1] - drag.view[0], moved = ((drag.x - event.clientX) / (canvas.clientWidth - LEFT)) * width;
      const start = Math.min(Math.max(0, drag.view[0] + moved), Math.max(0, total() - width));
      view = [start, start + width]; draw();
    });
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, at(event).part))); }, { passive: false });
    canvas.addEventListener("dblclick", reset);
    requestAnimationFrame(reset);
    state.charts.push({ build: () => { draw(); return { destroy() {} }; }, plot: { destroy() {} } });
    const notes = [];
    if (data.left_out) notes.push(`${data.left_out} steps of the trace are left out here, for size`);
    if (data.num_ranks > 64) notes.push(`64 of ${data.num_ranks} ranks are shown`);
    notes.push("trace.json in the run folder has everything: open it at ui.perfetto.dev");
    const kinds = data.kinds.filter((kind) => kind !== "free").slice(0, 24);
    return section("Timeline", controls, holder, keys(kinds.map((kind) => [kind, sliceColour(kind)])), el("p", { class: "note" }, notes.join("; ") + "."));
  }

  /* --- the rest --- */
  function gatesSection(run) {
    if (!run.gates.length) return null;
    return section("Experts in the last step", null, el("div", { class: "two" }, run.gates.map((gate) => {
      const most = Math.max(...gate.tokens) || 1, fair = gate.tokens.reduce((sum, each) => sum + each, 0) / gate.tokens.length;
      return el("div", {}, el("h3", {}, gate.gate), el("div", { class: "experts" }, gate.tokens.slice(0, 512).map((count, place) =>
        el("i", { title: `expert ${place}: ${digits(count)} slots, ${digits(count / fair, 3)} × its fair share`, style: { height: 100 * count / most + "%", opacity: count > 2 * fair ? 1 : 0.65 } }))),
      el("p", { class: "note" }, `${gate.tokens.length} experts; the busiest has ${digits(gate.busiest, 3)} × its fair share; ${digits(gate.dropped)} slots dropped; entropy ${digits(gate.entropy, 3)} nats`));
    })));
  }

  function stagesSection(run) {
    if (!run.stages.length) return null;
    return section("The model over stages", null, table(["stage", "ranks", "holds"], run.stages.map((stage) =>
      [stage.stage, stage.ranks.length > 12 ? `${stage.ranks.length} ranks` : stage.ranks.join(" "), el("div", { class: "mono" }, stage.lines.map((line) => el("div", {}, line)))])));
  }

  function plansSection(run) {
    if (!run.plans.length) return null;
    const better = run.plans.filter((plan) => plan.gain > 0.005 && plan.plan !== run.plan);
    const now = run.predicted ? `The plan of the run is predicted to take ${seconds(run.predicted.step_seconds)} per step, with ${bytes(run.predicted.peak_bytes)} at the peak.` : "";
    const words = better.length ? `${now} For the same devices and batch, the planner predicts:` : `${now} The planner knows no plan for the same devices and batch that is predicted to be 0.5 % faster; the best it knows:`;
    return section("How to do better", null, el("p", { class: "quiet" }, words), ...(better.length ? better : run.plans).map((plan) => el("div", { style: { marginTop: "12px" } },
      el("b", { class: plan.gain > 0.005 ? "good" : "quiet" }, known(plan.gain) ? (plan.gain >= 0 ? "+" : "−") + percent(Math.abs(plan.gain), 1) + " " : ""),
      el("code", {}, plan.plan), el("span", { class: "quiet" }, `  ${seconds(plan.seconds)} per step, ${bytes(plan.peak)} at the peak`),
      el("code", { class: "command" }, plan.command))));
  }

  function eventsSection(run) {
    if (!run.marks.length) return null;
    const rows = run.marks.filter((mark) => mark.kind !== "checkpoint").slice(-100);
    const saved = run.marks.filter((mark) => mark.kind === "checkpoint");
    const words = saved.length ? `${counted(saved.length, "checkpoint")}, the last after step ${saved[saved.length - 1].step}.` : "No checkpoint was saved.";
    return section("What happened", null, el("p", { class: "quiet" }, words), rows.length ? table(["step|", "what", "", "time"], rows.map((mark) => [mark.step, mark.kind, mark.text, mark.time || ""])) : "");
  }

  function machineSection(run) {
    const hosts = run.machine.map((host) => [host.host, host.devices.join(", "), host.cores]);
    const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ");
    return section("Machine and job", null,
      hosts.length ? table(["host", "ranks and devices", "cores|"], hosts) : "",
      el("p", { class: "note" }, [versions && `${versions}.`, run.cluster && `Predicted for ${run.cluster.count} × ${run.cluster.name}.`, run.started && `Started ${run.started}.`].filter(Boolean).join(" ")),
      run.job.length ? el("details", {}, el("summary", {}, "All settings"), table(["key", "value"], run.job.map(([key, value]) => [el("code", {}, key), value]))) : "",
      run.notes.length ? el("div", {}, el("h3", {}, "Notes"), el("ul", { class: "notes" }, run.notes.map((note) => el("li", {}, note)))) : "");
  }

  function tiles(run) {
    const f = run.figures, tile = (name, value, more) => (value === null ? null : el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "more" }, more || "")));
    const number = (value, show) => (known(value) ? show(value) : null);
    const hidden = known(f.overlap) ? f.overlap : f.hidden;
    return el("div", { class: "tiles" }, [
      tile("loss", number(f.loss, (v) => digits(v)), known(f.validation_loss) ? `validation ${digits(f.validation_loss)}` : ""),
      tile("accuracy", number(f.accuracy, (v) => percent(v, 1)), "of validation"),
      tile("steps", number(f.steps, (v) => v.toLocaleString("en-US")), known(f.of_steps) ? `of ${f.of_steps.toLocaleString("en-US")}` : ""),
      tile(run.unit + "/s", number(f.rate, (v) => digits(v, 3)), known(f.seconds) ? `${seconds(f.seconds)} per step` : ""),
      tile("MFU", number(f.mfu, (v) => percent(v, 1)), run.cluster ? `of ${run.cluster.count} × ${run.cluster.name}` : ""),
      tile("memory per rank", number(f.memory, bytes), "at the peak"),
      tile("sent per step", number(f.sent, bytes), known(hidden) && f.sent ? `${percent(hidden)} hidden` : ""),
      f.skipped || f.restarts || f.rollbacks ? tile("trouble", String(f.skipped + f.restarts + f.rollbacks), [f.skipped && `${f.skipped} skipped`, f.restarts && counted(f.restarts, "restart"), f.rollbacks && counted(f.rollbacks, "rollback")].filter(Boolean).join(", ")) : null,
    ].filter(Boolean));
  }

  const head = (run) => [
    el("div", { class: "head" }, el("h1", {}, run.name), el("span", { class: "badge " + (["finished", "running", "failed", "preempted"].includes(run.state) ? run.state : "") }, run.state),
      state.data.live ? el("span", { class: "quiet", id: "live" }, "live") : ""),
    el("p", { class: "sub" }, run.plan ? el("code", {}, run.plan) : "", run.reason ? el("span", { class: "bad" }, "  " + run.reason) : ""),
  ];
  const detail = (run) => [timelineSection, analysisSection, deviceSection, partsSection, memorySection, bytesSection, gatesSection, stagesSection, plansSection, eventsSection, machineSection].map((make) => make(run)).filter(Boolean);

  function comparison(data) {
    const rows = data.differences.map((row) => [row.name, ...row.values.map((value, place) => {
      const first = row.numbers && row.numbers[0], own = row.numbers && row.numbers[place];
      const change = place && known(first) && known(own) && first ? ` (${own >= first ? "+" : "−"}${percent(Math.abs(own / first - 1), 1)})` : "";
      return el("span", {}, value === null ? "–" : value, el("span", { class: "quiet" }, change));
    })]);
    return section("Differences", null, table(["", ...data.runs.map((run) => run.name)], rows));
  }

  function render(data) {
    state.charts.forEach((entry) => entry.plot.destroy());
    state.charts = []; state.data = data;
    const page = document.getElementById("page"), runs = data.runs, place = scrollY;
    if (runs.length === 1) page.replaceChildren(...head(runs[0]), tiles(runs[0]), ...(Object.keys(runs[0].series).length ? [curves(runs)] : [section("Curves", null, el("p", { class: "quiet" }, "No step was made."))]), ...detail(runs[0]));
    else page.replaceChildren(el("div", { class: "head" }, el("h1", {}, `${runs.length} runs`)),
      el("p", { class: "sub" }, runs.map((run, index) => el("div", {}, el("i", { class: "chip", style: { background: COLOURS[index % COLOURS.length] } }), run.name + "  ", run.plan ? el("code", {}, run.plan) : "", `  ${run.state}`))),
      curves(runs), comparison(data), ...runs.map((run) => el("details", { ontoggle: redraw }, el("summary", {}, run.name), tiles(run), ...detail(run))));
    document.body.append(tip);
    scrollTo(0, place);
  }

  render(JSON.parse(document.getElementById("data").textContent));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  /* While the run goes on, the server that sent this page has newer data. */
  if (state.data.live) {
    let version = state.data.version;
    const ask = async () => {
      try {
        const answer = await fetch("data.json?after=" + encodeURIComponent(version), { cache: "no-store" });
        if (answer.status === 200) { const data = await answer.json(); version = data.version; render(data); }
        const live = document.getElementById("live");
        if (live) live.textContent = "live";
      } catch (error) {
        const live = document.getElementById("live");
        if (live) live.textContent = "the server is gone";
      }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 2000);
  }
})();
