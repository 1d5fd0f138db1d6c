// Plots as SVG: lines over the last minute, and bars. Sizes are units of the viewBox.

const WIDTH = 380, HEIGHT = 176, LEFT = 48, RIGHT = 368, TOP = 10, BOTTOM = 134;
export const WINDOW_SECONDS = 60;

function draw(parent, name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
}

/** The end of an axis: a number not below `value` whose half is short too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((factor) => factor * power >= value);
}

export function short(value) {
  return String(Number(value.toPrecision(3)));
}

/** Clears the plot and draws its axes; returns the function from a value to its y. */
function axes(svg, top, yLabel, xTicks, xLabel) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * value) / top;
  for (const value of [0, top / 2, top]) {
    draw(svg, "line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value) });
    draw(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value));
  }
  for (const [x, text] of xTicks) draw(svg, "text", { x, y: BOTTOM + 16, "text-anchor": "middle" }, text);
  draw(svg, "text", { x: (LEFT + RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, xLabel);
  const middle = (TOP + BOTTOM) / 2;
  const turned = { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` };
  draw(svg, "text", turned, yLabel);
  return y;
}

/** `series`: lists of [second, value or null], at most two; `now` is the second at the right edge. */
export function lines(svg, series, now, unit, least, top = 0) {
  const x = (second) => RIGHT - ((now - second) / WINDOW_SECONDS) * (RIGHT - LEFT);
  const largest = Math.max(least, ...series.flat().map(([, value]) => value ?? 0));
  const ticks = [60, 40, 20, 0].map((ago) => [x(now - ago), ago ? `-${ago}` : "now"]);
  const y = axes(svg, top || roundUp(largest), unit, ticks, "seconds");
  series.forEach((points, index) => {
    let path = "";
    let broken = true; // A null breaks the line.
    for (const [second, value] of points) {
      const to = `${x(second).toFixed(1)} ${y(value ?? 0).toFixed(1)}`;
      // A line begins with a dash, so that a point between two nulls can be seen.
      if (value !== null) path += broken ? `M${to}h-2h4L${to}` : `L${to}`;
      broken = value === null;
    }
    draw(svg, "path", { class: index ? "series second" : "series", d: path });
  });
}

/** A bar for each value, with a line at their mean. */
export function bars(svg, values, unit, label) {
  const step = (RIGHT - LEFT) / values.length;
  const center = (index) => LEFT + (index + 0.5) * step;
  const every = Math.ceil(values.length / 16);
  const ticks = values.map((_, index) => [center(index), index]).filter(([, index]) => index % every === 0);
  const y = axes(svg, roundUp(Math.max(10, ...values)), unit, ticks, label);
  values.forEach((value, index) => {
    const box = { x: center(index) - step * 0.4, width: step * 0.8, y: y(value), height: BOTTOM - y(value) };
    draw(svg, "rect", { class: "bar", ...box });
  });
  const mean = y(values.reduce((sum, value) => sum + value, 0) / values.length);
  draw(svg, "path", { class: "series second", d: `M${LEFT} ${mean}H${RIGHT}` });
}
