// The heads move: a slider through the epochs, and a button that plays them.
(function () {
  "use strict";
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const between = (a, b, t) => a + (b - a) * t;
  // Angles of an ellipse repeat after half a turn: go the short way.
  const turned = (a, b, t) => a + ((((b - a + 90) % 180) + 180) % 180 - 90) * t;

  function setUp(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const slider = root.querySelector("input");
    const button = root.querySelector("button");
    const told = root.querySelector("output");
    const last = data.labels.length - 1;
    const layers = Array.from(root.querySelectorAll("svg")).map(function (svg, layer) {
      return Array.from(svg.querySelectorAll(".head")).map((group) => ({
        frames: data.layers[layer].map((frame) => frame[Number(group.dataset.head)]), trail: group.querySelector(".trail"),
        half: group.querySelector(".half"), most: group.querySelector(".most"), dot: group.querySelector(".dot"),
      }));
    });
    let time = last;
    let playing = false;
    let before = null;

    function draw() {
      const frame = Math.min(Math.floor(time), last);
      const next = Math.min(frame + 1, last);
      const part = time - frame;
      for (const layer of layers) for (const one of layer) {
        const a = one.frames[frame], b = one.frames[next];
        const row = between(a.at[0], b.at[0], part), column = between(a.at[1], b.at[1], part);
        one.dot.setAttribute("transform", `translate(${column} ${row})`);
        const way = one.frames.slice(0, frame + 1).map((each) => `${each.at[1]},${each.at[0]}`);
        one.trail.setAttribute("points", way.concat(`${column},${row}`).join(" "));
        one.half.setAttribute("fill-opacity", between(a.fill, b.fill, part));
        for (const [which, element] of [["half", one.half], ["most", one.most]]) {
          const here = a[which], there = b[which];
          if (typeof here !== "string" && typeof there !== "string") {
            const [r, c, long, short, angle] = here.map((value, k) => (k === 4 ? turned : between)(value, there[k], part));
            element.setAttribute("transform", `translate(${c} ${r}) rotate(${angle})`);
            element.setAttribute("d", oval(long, short));
          } else {
            const shape = part < 0.5 ? here : there;
            if (typeof shape === "string") {
              element.removeAttribute("transform");
              element.setAttribute("d", shape);
            } else {
              element.setAttribute("transform", `translate(${shape[1]} ${shape[0]}) rotate(${shape[4]})`);
              element.setAttribute("d", oval(shape[2], shape[3]));
            }
          }
        }
      }
      slider.value = String(Math.round(time));
      told.textContent = data.labels[Math.round(time)];
      slider.setAttribute("aria-valuetext", told.textContent);
    }
    // The long axis lies along the columns before it is turned.
    const oval = (long, short) => `M${-long} 0A${long} ${short} 0 1 0 ${long} 0A${long} ${short} 0 1 0 ${-long} 0Z`;

    function step(now) {
      if (!playing) return;
      if (before !== null) {
        const passed = Math.min((now - before) / 1000, 0.1) * Math.max(last / 7, 2);
        time = Math.min(time + passed, last);
      }
      before = now;
      draw();
      if (time >= last) stop(); else window.requestAnimationFrame(step);
    }
    function leap() { // without motion: epoch by epoch, unhurried
      if (!playing) return;
      time = Math.min(Math.floor(time) + 1, last);
      draw();
      if (time >= last) stop(); else window.setTimeout(leap, 600);
    }
    function play() {
      if (time >= last) time = 0;
      playing = true;
      before = null;
      button.textContent = "Pause";
      if (calm.matches) leap(); else window.requestAnimationFrame(step);
    }
    function stop() {
      playing = false;
      button.textContent = "Play";
    }
    button.addEventListener("click", () => (playing ? stop() : play()));
    slider.addEventListener("input", function () {
      stop();
      time = Number(slider.value);
      draw();
    });
    draw();
    if (!calm.matches && "IntersectionObserver" in window && root.hasAttribute("data-eager")) {
      const watcher = new IntersectionObserver(function (entries) {
        if (entries.some((entry) => entry.isIntersecting)) {
          watcher.disconnect();
          if (!playing && time === last) play();
        }
      }, { threshold: 0.5 });
      watcher.observe(root);
    }
  }
  document.querySelectorAll(".player").forEach(setUp);
})();
