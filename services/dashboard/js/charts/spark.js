// A sparkline of the newest rewards.

import { h } from "../dom.js";
import { number } from "../format.js";
import { color, faded } from "../palette.js";

export class Spark {
  constructor() {
    this.element = h("canvas", { class: "spark", role: "img", "aria-label": "No rewards yet" });
    this.drawn = "";
  }

  draw(values, toneName = "accent") {
    const numbers = values.filter((value) => value !== null);
    const key = `${numbers.join()} ${color(toneName)} ${this.element.clientWidth}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const text = numbers.length ? `Reward, newest ${number(numbers.at(-1))}, from ${number(numbers[0])}` : "No rewards yet";
    this.element.setAttribute("aria-label", text);
    this.element.title = text;
    const { clientWidth: width, clientHeight: height } = this.element;
    const scale = devicePixelRatio || 1;
    this.element.width = Math.round(width * scale);
    this.element.height = Math.round(height * scale);
    const context = this.element.getContext("2d");
    context.scale(scale, scale);
    if (numbers.length > 1 && width) paint(context, numbers, width, height, toneName);
  }
}

function paint(context, values, width, height, toneName) {
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const points = values.map((value, i) => [2 + (i * (width - 6)) / (values.length - 1), height - 4 - ((value - low) / span) * (height - 8)]);
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.strokeStyle = color(toneName);
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(points.at(-1)[0], height);
  context.lineTo(points[0][0], height);
  context.fillStyle = faded(toneName, 0.1);
  context.fill();
  context.beginPath();
  context.arc(...points.at(-1), 2.4, 0, 7);
  context.fillStyle = color(toneName);
  context.fill();
}
