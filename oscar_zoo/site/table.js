"use strict";
// Search and sort the table of the first page. Without this script it is a plain table, by name.
{
  const table = document.getElementById("zoo");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const family = document.getElementById("family");
  const order = document.getElementById("order");
  const count = document.getElementById("count");
  const all = count.textContent;
  let column = 0;
  let down = false;

  const key = (row) => row.cells[column].dataset.sort;

  function compare(one, two) {
    const a = key(one), b = key(two);
    if (a === "" || b === "") return (a === "") - (b === ""); // a gap is last in both directions
    const number = heads[column].dataset.kind === "number";
    const found = number ? a - b : a.localeCompare(b, "en", { numeric: true });
    return down ? -found : found;
  }

  function sort(next, turn) {
    down = next === column && turn ? !down : false;
    column = next;
    heads.forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    order.value = column;
    body.append(...rows.sort(compare));
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const found =
        words.every((word) => row.dataset.words.includes(word)) &&
        (family.value === "" || row.dataset.family === family.value);
      row.hidden = !found;
      shown += found;
    }
    count.textContent = shown === rows.length ? all : `${shown} of ${rows.length} artifacts.`;
    document.getElementById("none").hidden = shown > 0;
  }

  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(at, true));
    head.append(button);
  });
  search.addEventListener("input", filter);
  family.addEventListener("change", filter);
  order.addEventListener("change", () => sort(Number(order.value), false));
  document.getElementById("controls").hidden = false;
  heads[0].setAttribute("aria-sort", "ascending");
  filter(); // a browser may have kept what was entered
}
