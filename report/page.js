// The list of readings is searched by words and by verdict; a slider goes through the sections of
// the two readings that stand side by side. Without it everything is shown.
const readings = [...document.querySelectorAll("details.reading")];
const [words, verdict, shown] = ["words", "verdict", "shown"].map((id) => document.getElementById(id));

function filter() {
  const wanted = words.value.toLowerCase();
  const fitting = readings.filter((each) => {
    each.hidden = (verdict.value && each.dataset.verdict !== verdict.value)
      || !each.textContent.toLowerCase().includes(wanted);
    return !each.hidden;
  });
  shown.textContent = `${fitting.length} of ${readings.length}`;
}

if (words) {
  for (const field of [words, verdict]) field.addEventListener("input", filter);
  filter();
}

const slide = document.getElementById("slide");
const steps = [...document.querySelectorAll(".pair .step")];
const numbers = [...new Set(steps.map((each) => Number(each.dataset.step)))].sort((a, b) => a - b);

function slideTo() {
  const number = numbers[slide.querySelector("input").value - 1];
  for (const each of steps) each.hidden = Number(each.dataset.step) !== number;
  slide.querySelector("output").textContent = number;
}

if (numbers.length > 1) {
  slide.hidden = false;
  slide.querySelector("input").max = numbers.length;
  slide.addEventListener("input", slideTo);
  // it begins where the two memories first differ
  const memory = (each) => each.querySelector(".memory").textContent;
  const differs = (number) => {
    const texts = steps.filter((each) => Number(each.dataset.step) === number).map(memory);
    return texts.length < 2 || new Set(texts).size > 1;  // a folded one stayed as it was
  };
  const first = numbers.findIndex(differs);
  slide.querySelector("input").value = 1 + Math.max(first, 0);
  slideTo();
}
