// Questions to the user in the browser's own modal dialog, which keeps the focus and closes on Escape.

import { h, setText } from "./dom.js";

/**
 * Ask for confirmation, then call `act`. The dialog stays open while `act` runs and shows the error if it throws.
 * Resolves to true when `act` is done, to false if the user cancels.
 *
 * fields: elements between the text and the buttons.
 */
export function confirmed({ title, text, button, danger = false, fields = [], act }) {
  const problem = h("p", { class: "problem", role: "alert" });
  const yes = h("button", { class: `button primary${danger ? " danger" : ""}`, type: "submit" }, button);
  const no = h("button", { class: "button", type: "button" }, "Cancel");
  const form = h("form", {}, h("h2", {}, title), text && h("p", {}, text), fields, problem, h("div", { class: "row" }, no, yes));
  const dialog = h("dialog", { "aria-label": title }, form);
  return new Promise((resolve) => {
    let result = false;
    no.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      yes.disabled = true;
      try {
        await act();
        result = true;
        dialog.close();
      } catch (error) {
        setText(problem, error.message);
        yes.disabled = false;
      }
    });
    document.body.append(dialog);
    dialog.showModal();
    (fields[0]?.querySelector?.("input") ?? (danger ? no : yes)).focus();
  });
}

/** Ask for a token; resolves to it, or to null if the user cancels. */
export async function askToken(message) {
  const input = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "Token" });
  const field = h("label", { class: "field" }, h("span", {}, "Token"), input);
  const given = await confirmed({
    title: "This server requires a token",
    text: `${message ? `${message} ` : ""}Create one with: volley token create NAME`,
    button: "Continue",
    fields: [field],
    act: async () => {},
  });
  return given ? input.value.trim() : null;
}

export function toast(text, tone = "info") {
  const box = h("div", { class: "toast", data: { tone } }, text);
  document.getElementById("toasts").append(box);
  setTimeout(() => box.remove(), tone === "bad" ? 9000 : 4500);
}
