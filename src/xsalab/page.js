"use strict";
// What a script adds to the report: legends that show and hide an arm, exact values under the pointer, zoom, and a
// choice of the measure. Everything is there without it. Texts come from the page's own attributes and are only ever
// set as text. A chart's paths are in the units of its data, so a zoom is one matrix and a value is read, not guessed.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NEAR = 40; // pixels from a line at which it still answers
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const make = (name, attributes, text = "") => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const plain = (value) => String(Number(value.toPrecision(6))).replace(/-/g, "−");
  document.documentElement.classList.add("js");

  // Arms: an entry of any legend shows and hides its arm in all pictures.

  const hidden = new Set();
  const keys = all(".key");
  const toggle = (arm) => {
    if (!hidden.delete(arm)) hidden.add(arm);
    for (const mark of all("[data-arm]")) {
      if (mark.dataset.arm !== arm) continue;
      if (mark.classList.contains("key")) mark.setAttribute("aria-pressed", String(!hidden.has(arm)));
      else mark.classList.toggle("off", hidden.has(arm));
    }
  };
  for (const key of keys) {
    key.setAttribute("role", "button");
    key.setAttribute("aria-pressed", "true");
    key.tabIndex = 0;
    key.addEventListener("click", () => toggle(key.dataset.arm));
    key.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); // the space bar would scroll
      toggle(key.dataset.arm);
    });
  }

  // Tooltips. A <title> is the browser's own tooltip: it is emptied while ours shows the same words.

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let held = null;
  const show = (words, event) => {
    tip.textContent = words;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const below = event.clientY + 18 + height < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - height - 10}px`;
  };
  const hide = () => {
    tip.hidden = true;
    if (held) held.title.textContent = held.words;
    held = null;
  };
  document.addEventListener("pointerover", (event) => {
    const mark = event.target;
    if (!(mark instanceof SVGElement) || mark.closest(".plot")) return;
    hide();
    const title = [...mark.children].find((child) => child.localName === "title");
    if (!title || !title.textContent) return;
    held = { title, words: title.textContent };
    title.textContent = "";
    const name = mark.closest("[data-name]")?.dataset.name;
    show(name ? `${name}, ${held.words}` : held.words, event);
  });
  document.addEventListener("pointerout", (event) => {
    if (held && event.target === held.title.parentNode) hide();
  });

  // Charts

  class Chart {
    constructor(plot) {
      this.plot = plot;
      this.layer = plot.querySelector("g");
      this.picture = plot.parentNode;
      this.axes = this.picture.querySelector(".axes");
      this.drawn = [...this.axes.childNodes];
      this.frame = ["x", "y", "width", "height"].map((name) => Number(plot.getAttribute(name)));
      this.whole = plot.dataset.range.split(" ").map(Number);
      this.range = this.whole;
      this.names = new Map((plot.dataset.names || "").split("|").map((entry) => {
        const [place, name] = entry.split("=");
        return [Number(place), name];
      }));
      this.lines = null;
      this.hot = null;
      const [, , width, height] = this.frame; // between the lines there is nothing that a pointer could be over
      plot.prepend(make("rect", { width, height, fill: "none", "pointer-events": "all" }));
      plot.addEventListener("pointermove", (event) => this.point(event));
      plot.addEventListener("pointerleave", () => this.leave());
      if ("zoom" in plot.dataset) this.zoomable();
    }

    zoomable() {
      this.picture.tabIndex = 0;
      this.picture.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("dblclick", () => this.zoom(this.whole));
      this.plot.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return; // the wheel alone scrolls the page
        event.preventDefault();
        this.scale(event.deltaY < 0 ? 0.8 : 1.25, this.place(event));
      }, { passive: false });
      this.plot.addEventListener("pointerdown", (event) => {
        if (event.button !== 0 || event.pointerType === "touch") return;
        event.preventDefault(); // selects no text
        this.picture.focus({ preventScroll: true });
        this.start = this.place(event);
        this.plot.setPointerCapture(event.pointerId);
      });
      this.plot.addEventListener("pointerup", () => {
        const box = this.box;
        this.forget();
        if (box) this.zoom(box);
      });
    }

    // Where the pointer is, in the units of the data.
    place(event) {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.layer.getScreenCTM().inverse());
      return { x, y };
    }

    // Each line with its points; bands only fill. The browser's own tooltips go, ours says more.
    read() {
      this.lines = all("path", this.layer).map((path) => {
        const title = path.querySelector("title");
        const words = title.textContent;
        title.remove();
        const points = path.getAttribute("d").slice(1).replace("Z", "").split("L").map((p) => p.split(" ").map(Number));
        return { path, words, points, band: path.classList.contains("bar") };
      }).filter((line) => !line.band);
    }

    point(event) {
      if (!this.lines) this.read();
      const at = this.place(event);
      if (this.start) return this.drag(at);
      const matrix = this.layer.getScreenCTM();
      let best = { distance: NEAR };
      for (const line of this.lines) {
        if (line.path.classList.contains("off")) continue;
        const [step, value] = nearest(line.points, at.x);
        const distance = Math.hypot((step - at.x) * matrix.a, (value - at.y) * matrix.d);
        if (distance < best.distance) best = { distance, line, step, value };
      }
      this.light(best.line);
      if (!best.line) return hide();
      const [, , low, high] = this.whole;
      const far = 49 * (high - low); // what was further out has been clamped, so its value is not known here
      const value = best.value > high + far || best.value < low - far ? "off the scale" : plain(best.value);
      const step = this.names.get(best.step) ?? plain(best.step);
      show(`${best.line.words}, ${this.plot.dataset.word} ${step}: ${value}`, event);
    }

    light(line) {
      if (this.hot && this.hot !== line) this.hot.path.classList.remove("hot");
      if (line) line.path.classList.add("hot");
      this.hot = line || null;
    }

    leave() {
      this.light(null);
      hide();
    }

    drag(at) {
      const [left, right, low, high] = this.range;
      const clip = (value, least, most) => Math.max(least, Math.min(most, value));
      const x = [this.start.x, clip(at.x, left, right)].sort((a, b) => a - b);
      const y = [this.start.y, clip(at.y, low, high)].sort((a, b) => a - b);
      const large = x[1] - x[0] > 0.02 * (right - left) && y[1] - y[0] > 0.02 * (high - low); // else it was a click
      this.box = large ? [...x, ...y] : null;
      if (!this.mark) this.layer.append(this.mark = make("rect", { class: "box-of-zoom", "vector-effect": "non-scaling-stroke" }));
      const shape = { x: x[0], y: y[0], width: x[1] - x[0], height: y[1] - y[0] };
      for (const [name, value] of Object.entries(shape)) this.mark.setAttribute(name, value);
      hide();
    }

    forget() {
      if (this.mark) this.mark.remove();
      this.mark = this.start = this.box = null;
    }

    key(event) {
      const [left, right, low, high] = this.range;
      const across = 0.2 * (right - left);
      const up = 0.2 * (high - low);
      const move = (x, y) => this.zoom([left + x, right + x, low + y, high + y]);
      const middle = { x: (left + right) / 2, y: (low + high) / 2 };
      const zoomed = this.range !== this.whole;
      if (event.key === "+" || event.key === "=") this.scale(0.7, middle);
      else if (event.key === "-" || event.key === "−") this.scale(1 / 0.7, middle);
      else if (event.key === "Escape") { this.forget(); this.zoom(this.whole); }
      else if (zoomed && event.key === "ArrowLeft") move(-across, 0);
      else if (zoomed && event.key === "ArrowRight") move(across, 0);
      else if (zoomed && event.key === "ArrowUp") move(0, up);
      else if (zoomed && event.key === "ArrowDown") move(0, -up);
      else return;
      event.preventDefault();
    }

    scale(factor, { x, y }) {
      const [left, right, low, high] = this.range;
      const size = (right - left) * factor;
      const full = this.whole[1] - this.whole[0];
      if (size >= full) return this.zoom(this.whole);
      if (size < full / 1000) return;
      this.zoom([x - (x - left) * factor, x + (right - x) * factor, y - (y - low) * factor, y + (high - y) * factor]);
    }

    zoom(range) {
      const [left, right, low, high] = this.range = range;
      const [, , width, height] = this.frame;
      const across = width / (right - left);
      const up = -height / (high - low);
      this.layer.setAttribute("transform", `matrix(${across} 0 0 ${up} ${-left * across} ${height - low * up})`);
      this.axes.replaceChildren(...(range === this.whole ? this.drawn : this.ticks()));
      hide();
    }

    ticks() {
      const [x, y, width, height] = this.frame;
      const [left, right, low, high] = this.range;
      const marks = [];
      for (const [value, label] of round(low, high)) {
        const at = y + height - ((value - low) / (high - low)) * height;
        marks.push(make("line", { class: value === 0 ? "zero" : "grid", x1: x, x2: x + width, y1: at, y2: at }));
        marks.push(make("text", { class: "small", x: x - 7, y: at + 4, "text-anchor": "end" }, label));
      }
      for (const [value, label] of round(left, right)) {
        const at = x + ((value - left) / (right - left)) * width;
        marks.push(make("text", { class: "small", x: at, y: y + height + 16, "text-anchor": "middle" }, label));
      }
      return marks;
    }
  }

  // The point whose step is nearest; steps ascend.
  function nearest(points, step) {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle;
      else high = middle;
    }
    return step - points[low][0] < points[high][0] - step ? points[low] : points[high];
  }

  // About six round values with their labels.
  function round(low, high) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 6));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= ((high - low) / 6) * 0.999);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i += 1) {
      found.push([i * step, (i * step).toFixed(places).replace("-", "−")]);
    }
    return found;
  }

  const charts = all(".plot").map((plot) => new Chart(plot));

  // Measures

  for (const choice of all("select[data-maps]")) {
    choice.addEventListener("change", () => {
      for (const map of document.getElementById(choice.dataset.maps).children) {
        map.classList.toggle("chosen", map.dataset.measure === choice.value);
      }
    });
  }

  // Paper shows everything: what was closed is open, what was zoomed is whole. Styles show hidden arms again.

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const part of opened) part.open = true;
    for (const chart of charts) chart.zoom(chart.whole);
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
  });
})();
