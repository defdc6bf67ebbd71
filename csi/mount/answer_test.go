package mount

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// What a child answers is what the call would have answered: the text and the sentinel.
func TestAnswerKeepsErrors(t *testing.T) {
	for _, kind := range append(kindsOfErrors(), errors.New("another")) {
		err := fmt.Errorf("%w: device /dev/nbd0: why", kind)
		var before, after answer
		before.set(err)
		b, jsonErr := json.Marshal(before)
		if jsonErr != nil || json.Unmarshal(b, &after) != nil {
			t.Fatal(jsonErr)
		}
		want := kind
		if kind.Error() == "another" {
			want = block.ErrIO
		}
		if got := after.err(); !errors.Is(got, want) || got.Error() != err.Error() {
			t.Errorf("%v became %v", err, got)
		}
	}
	var none answer
	none.set(nil)
	if err := none.err(); err != nil {
		t.Error(err)
	}
}

// A child that is told what it does not know says so.
func TestUnknownTask(t *testing.T) {
	for text, code := range map[string]int{"no task": 2, `{"Do":"something else"}`: 0} {
		var out bytes.Buffer
		if got := work(text, &out); got != code {
			t.Errorf("%s: exit code %d", text, got)
		}
		var a answer
		if code == 0 && (json.Unmarshal(out.Bytes(), &a) != nil || !errors.Is(a.err(), block.ErrInvalid)) {
			t.Errorf("%s: %s", text, out.String())
		}
	}
}
