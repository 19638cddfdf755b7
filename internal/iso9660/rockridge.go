package iso9660

// Rock Ridge entries live in the system use area of the records below the primary descriptor. Each has a two-letter
// signature, its length and its version.

const entryVersion = 1

// Only root may read the files: they can hold secrets, and a guest may mount any volume it finds for any user.
const (
	modeDirectory = 0o040500
	modeFile      = 0o100400
)

func entry(signature string, payload []byte) []byte {
	const header = 4
	out := append([]byte(signature), byte(header+len(payload)), entryVersion)
	return append(out, payload...)
}

// rockRidgeSelf is the system use area of the root directory's record of itself. It announces that system use areas are
// shared (SP) and where they go on (CE).
func rockRidgeSelf(more extent) []byte {
	const magic, skip = "\xbe\xef", "\x00"
	out := entry("SP", []byte(magic+skip))
	out = append(out, posixAttributes(modeDirectory, 2)...)
	return append(out, continuation(more)...)
}

func rockRidgeParent() []byte {
	return posixAttributes(modeDirectory, 2)
}

func rockRidgeFile(name string) []byte {
	return append(posixAttributes(modeFile, 1), alternateName(name)...)
}

// posixAttributes is mode, links, user and group, as the version named in rockRidgeReference has it: no serial number.
func posixAttributes(mode, links uint32) []byte {
	var payload []byte
	for _, v := range []uint32{mode, links, 0, 0} {
		payload = append(payload, both32(v)...)
	}
	return entry("PX", payload)
}

func alternateName(name string) []byte {
	const flags = "\x00" // the whole name is in this entry
	return entry("NM", []byte(flags+name))
}

func continuation(more extent) []byte {
	payload := both32(more.sector)
	payload = append(payload, both32(0)...) // offset in the sector
	return entry("CE", append(payload, both32(more.size)...))
}

// rockRidgeReference says which extension the other entries belong to. The texts are the ones the protocol prescribes.
func rockRidgeReference() []byte {
	const (
		identifier = "RRIP_1991A"
		descriptor = "THE ROCK RIDGE INTERCHANGE PROTOCOL PROVIDES SUPPORT FOR POSIX FILE SYSTEM SEMANTICS"
		source     = "PLEASE CONTACT DISC PUBLISHER FOR SPECIFICATION SOURCE.  SEE PUBLISHER IDENTIFIER IN PRIMARY VOLUME " +
			"DESCRIPTOR FOR CONTACT INFORMATION."
		version = 1
	)
	payload := []byte{byte(len(identifier)), byte(len(descriptor)), byte(len(source)), version}
	return entry("ER", append(payload, identifier+descriptor+source...))
}
