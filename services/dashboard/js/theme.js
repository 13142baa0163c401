// The light or dark theme: the system's until the user chooses one; the choice is remembered.

import { fill, icon } from "./dom.js";
import { forgetColors } from "./palette.js";

const KEY = "volley-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const SUN = ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8", "M12 3v1.500M12 19.500V21M3 12h1.500M19.500 12H21M5.600 5.600l1.100 1.100M17.300 17.300l1.100 1.100M5.600 18.400l1.100-1.100M17.300 6.700l1.100-1.100"];
const MOON = ["M20 14.500A8.300 8.300 0 0 1 9.500 4 8.300 8.300 0 1 0 20 14.500"];

export function currentTheme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  forgetColors();
  const button = document.getElementById("theme");
  const other = currentTheme() === "dark" ? "light" : "dark";
  fill(button, icon(...(other === "light" ? SUN : MOON)));
  button.setAttribute("aria-label", `Use the ${other} theme`);
  button.title = `Use the ${other} theme`;
  dispatchEvent(new Event("volley-theme"));
}

export function startTheme() {
  apply(localStorage.getItem(KEY));
  dark.addEventListener("change", () => apply(null));
  document.getElementById("theme").addEventListener("click", () => {
    const theme = currentTheme() === "dark" ? "light" : "dark";
    localStorage.setItem(KEY, theme);
    apply(theme);
  });
}
