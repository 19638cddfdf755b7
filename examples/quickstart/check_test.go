package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestRun_CheckReportsTheHostAndMakesNothing(t *testing.T) {
	var out, errs bytes.Buffer
	c := command{stdout: &out, stderr: &errs, release: func() {}, open: openSite}
	if code := c.run(t.Context(), []string{"-check"}); code != exitDone {
		t.Fatalf("exit code %d, want %d: %s%s", code, exitDone, &out, &errs)
	}
	for _, want := range []string{"passed   dial", "passed   read-write", "passed   pool"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "Create") {
		t.Errorf("a machine was made:\n%s", &out)
	}
}

func TestParse_CheckRefusesWhatIsOfAMachine(t *testing.T) {
	_, err := parse([]string{"-check", "-name", "web-2"})
	if err == nil || !strings.Contains(err.Error(), "-name does not go with -check") {
		t.Errorf("parse() = %v", err)
	}
}
