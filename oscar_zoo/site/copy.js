"use strict";
// A button that copies a command. Without this script the command can be selected.
for (const block of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  const command = block.querySelector("code").textContent;
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${command}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
      getSelection().selectAllChildren(block.querySelector("code"));
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}
