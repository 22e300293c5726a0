// SPDX-License-Identifier: Apache-2.0

// Command netsh replaces Wine's netsh.exe, because Wine's program does nothing. It sends
// its arguments to the test, which adds and deletes addresses. The test answers with the
// output and the exit status of the command.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
)

func main() {
	// The fixed port is free, because each test has its own network namespace.
	c, err := net.Dial("tcp", "127.0.0.1:5555")
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	var answer struct {
		Text   string
		Status int
	}
	err = json.NewEncoder(c).Encode(os.Args[1:])
	if err == nil {
		err = json.NewDecoder(c).Decode(&answer)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	fmt.Println(answer.Text)
	os.Exit(answer.Status)
}
