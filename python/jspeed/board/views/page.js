// Sorts a table by the column whose head is clicked. Rows are groups (tbody), so that the second row of an entry
// follows its first. Empty values stay last.
for (const table of document.querySelectorAll("table.board")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const number = head.classList.contains("n"), sign = down ? -1 : 1;
    const key = body => body.rows[0].cells[column].dataset.v;
    const order = (a, b) => number ? a - b : a.localeCompare(b);
    [...table.tBodies]
      .sort((a, b) => (key(a) === "") - (key(b) === "") || sign * order(key(a), key(b)))
      .forEach(body => table.append(body));
  }));
}
